"""Names of hooks. A hook's own file registers it; nothing else in the package knows a hook by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    from ..hooks.base import CommHook

ENTRY_POINT_GROUP = "accel_commhooks.hooks"

_hooks: dict[str, type[CommHook]] = {}
_aliases: dict[str, str] = {}
_discovered = False


def register_hook(name: str, *, aliases: Iterable[str] = ()) -> Callable[[type[CommHook]], type[CommHook]]:
    """Class decorator that makes a :class:`CommHook` known under ``name``; a name that is taken is refused."""

    def register(cls: type[CommHook]) -> type[CommHook]:
        for taken in (name, *aliases):
            owner = _hooks.get(_aliases.get(taken, taken))
            if owner is not None:
                raise ConfigError(
                    f"a hook named '{taken}' is registered already ({owner.__module__}.{owner.__qualname__}); "
                    "choose another name"
                )
        cls.name = name
        _hooks[name] = cls
        _aliases.update(dict.fromkeys(aliases, name))
        return cls

    return register


def unregister_hook(name: str) -> None:
    """Forget a hook, for plugins that reload and for tests."""
    get_hook(name)
    _hooks.pop(name)
    for alias in [alias for alias, target in _aliases.items() if target == name]:
        _aliases.pop(alias)


def available_hooks() -> list[str]:
    """The names of all hooks that can be used here, third-party ones included, in alphabetical order."""
    _discover()
    return sorted(_hooks)


def get_hook(name: str) -> type[CommHook]:
    """The hook class for a name, an alias, or ``torch:function`` / ``package.module:function``."""
    _discover()
    if ":" in name:
        from ..hooks.foreign import foreign_hook

        return foreign_hook(name)
    cls = _hooks.get(_aliases.get(name, name))
    if cls is None:
        raise ConfigError(
            f"there is no hook named '{name}'{nearest(name, [*_hooks, *_aliases])}\n"
            f"  hooks: {', '.join(sorted(_hooks))}\n"
            "  a function of your own is named 'package.module:function', torch's are 'torch:powerSGD_hook', ..."
        )
    return cls


def _discover() -> None:
    """Import every file under hooks/ and every installed plugin, once."""
    global _discovered
    if _discovered:
        return
    _discovered = True
    from .. import hooks

    for module in pkgutil.walk_packages(hooks.__path__, f"{hooks.__name__}."):
        importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()

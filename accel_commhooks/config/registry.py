"""Names of hooks.

A hook registers itself from its own file, and nothing else in the package knows it by name. Hooks are found when a name is
first asked for: every module below ``accel_commhooks.hooks``, then every installed plugin.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    from ..hooks.base import CommHook

BUILT_IN = "accel_commhooks.hooks"
ENTRY_POINT_GROUP = "accel_commhooks.hooks"

Resolver = Callable[[str], "type[CommHook]"]

_hooks: dict[str, type[CommHook]] = {}
_aliases: dict[str, str] = {}
_resolve_path: Resolver | None = None
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


def resolves_paths(resolver: Resolver) -> Resolver:
    """Function decorator: ``resolver`` turns a name with a colon, ``package.module:function``, into a hook class."""
    global _resolve_path
    _resolve_path = resolver
    return resolver


def unregister_hook(name: str) -> None:
    """Remove a hook; for plugins that reload, and for tests."""
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
        assert _resolve_path is not None
        return _resolve_path(name)
    cls = _hooks.get(_aliases.get(name, name))
    if cls is None:
        raise ConfigError(
            f"there is no hook named '{name}'{nearest(name, [*_hooks, *_aliases])}\n"
            f"  hooks: {', '.join(sorted(_hooks))}\n"
            "  a function of your own is named 'package.module:function', torch's are 'torch:powerSGD_hook', ..."
        )
    return cls


def _discover() -> None:
    """Import every built-in hook and every installed plugin, once."""
    global _discovered
    if _discovered:
        return
    _discovered = True
    built_in = importlib.import_module(BUILT_IN)
    for module in pkgutil.walk_packages(built_in.__path__, f"{BUILT_IN}."):
        importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()

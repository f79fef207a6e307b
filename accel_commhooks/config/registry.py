"""Names of hooks.

A hook registers itself from its own file, and nothing else in the package knows it by name. Hooks are found when a name is
first asked for: every module below ``accel_commhooks.hooks``, then every installed plugin. A plugin that fails is reported and
left out; a module of this package that fails is an error, and is tried again the next time.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from .errors import ConfigError, described, nearest, shown, warn_once

if TYPE_CHECKING:
    from ..hooks.base import CommHook

BUILT_IN = "accel_commhooks.hooks"
ENTRY_POINT_GROUP = "accel_commhooks.hooks"

Resolver = Callable[[str], "type[CommHook]"]

_hooks: dict[str, type[CommHook]] = {}
_aliases: dict[str, str] = {}
_resolve_path: Resolver | None = None
_stand_in: Resolver | None = None
_built_in_found = _plugins_found = _discovering = False
_failed_plugins: dict[str, str] = {}
_not_checked: list[str] | None = None
"""What was left out because foreign code may not run now; None while it may."""


def register_hook(name: str, *, aliases: Iterable[str] = ()) -> Callable[[type[CommHook]], type[CommHook]]:
    """Class decorator that makes a :class:`CommHook` known under ``name``; a name that is taken is refused."""

    def register(cls: type[CommHook]) -> type[CommHook]:
        for taken in (name, *aliases):
            known_as = _aliases.get(taken, taken)
            owner = _hooks.get(known_as)
            # A module that failed after this line and is imported again brings the same class anew.
            again = known_as == name and owner is not None and _path(owner) == _path(cls)
            if owner is not None and not again:
                raise ConfigError(f"a hook named '{taken}' is registered already ({_path(owner)}); choose another name")
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


def stands_in(resolver: Resolver) -> Resolver:
    """Function decorator: ``resolver`` turns the name of a hook that may not be imported into a class with its options."""
    global _stand_in
    _stand_in = resolver
    return resolver


@contextlib.contextmanager
def without_foreign_code() -> Iterator[list[str]]:
    """Until it ends no plugin and no ``package.module:function`` is imported; the list says what was left unchecked."""
    global _not_checked
    before, _not_checked = _not_checked, []
    try:
        yield _not_checked
    finally:
        _not_checked = before


def unregister_hook(name: str) -> None:
    """Remove a hook; for plugins that reload, and for tests."""
    get_hook(name)
    _remove(name)


def _remove(name: str) -> None:
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
        if _not_checked is not None and not name.startswith("torch:"):
            return _left_out(name, "it was not imported")
        assert _resolve_path is not None
        return _resolve_path(name)
    cls = _hooks.get(_aliases.get(name, name))
    if cls is None and _not_checked is not None and not _plugins_found:
        plugins = [_label(plugin) for plugin in _entry_points()]
        if plugins:
            meant = nearest(name, [*_hooks, *_aliases])
            return _left_out(name, f"it is no hook of this package{meant}, and {', '.join(plugins)} was not imported")
    if cls is None:
        failed = "".join(f"\n  the plugin {plugin} failed: {error}" for plugin, error in _failed_plugins.items())
        raise ConfigError(
            f"there is no hook named {shown(name)}{nearest(name, [*_hooks, *_aliases])}\n"
            f"  hooks: {', '.join(sorted(_hooks))}\n"
            "  a function of your own is named 'package.module:function', torch's are 'torch:powerSGD_hook', ..."
            + failed
        )
    return cls


def _left_out(name: str, reason: str) -> type[CommHook]:
    assert _stand_in is not None and _not_checked is not None
    cls = _stand_in(name)
    note = f"{shown(name)} was not checked: {reason}; of its options only those that every such hook has were checked"
    if note not in _not_checked:
        _not_checked.append(note)
    return cls


def _discover() -> None:
    """Import every built-in hook and every installed plugin, once; a built-in one that fails is tried again each time."""
    global _built_in_found, _plugins_found, _discovering
    if _discovering:  # a module that is being imported asks for a name
        return
    _discovering = True
    try:
        if not _built_in_found:
            built_in = importlib.import_module(BUILT_IN)
            for module in pkgutil.walk_packages(built_in.__path__, f"{BUILT_IN}."):
                importlib.import_module(module.name)
            _built_in_found = True
        if not _plugins_found and _not_checked is None:
            for plugin in _entry_points():
                _load(plugin)
            _plugins_found = True
    finally:
        _discovering = False


def _entry_points() -> list[EntryPoint]:
    return list(entry_points(group=ENTRY_POINT_GROUP))


def _load(plugin: EntryPoint) -> None:
    """Import a plugin. One that fails is reported, and hooks of the module that failed are forgotten."""
    before = set(_hooks.values())
    try:
        plugin.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: other people's packages must not end or disable this one
        _failed_plugins[_label(plugin)] = described(error)
        warn_once(f"the plugin {_label(plugin)} could not be loaded, its hooks are missing: {described(error)}")
        for name, cls in list(_hooks.items()):
            if cls not in before and cls.__module__ not in sys.modules:
                _remove(name)


def _label(plugin: EntryPoint) -> str:
    package = f" of {plugin.dist.name}" if plugin.dist is not None else ""
    return f"'{plugin.name}'{package} ({plugin.value})"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

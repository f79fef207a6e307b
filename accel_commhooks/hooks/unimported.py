"""Stand-ins for hooks whose code may not run now: their options are checked as far as they are known without it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..config.errors import ConfigError, shown
from ..config.options import HookOptions
from ..config.registry import stands_in
from ..config.values import problem_inside
from .base import CommHook
from .foreign import ForeignOptions, split_path

if TYPE_CHECKING:
    from typing_extensions import Self


class _PartlyKnown(HookOptions):
    """Options of which some may be the hook's own, so a name that is not known is no mistake."""

    @classmethod
    def build(cls, hook_name: str, values: dict[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in values.items():
            problem = (
                problem_inside(name, value)
                if isinstance(name, str)
                else f"an option is named by text, not {shown(name)}"
            )
            if problem is not None:
                raise ConfigError(problem)
        return super().build(hook_name, {name: value for name, value in values.items() if name in known})


class _FunctionOptions(_PartlyKnown, ForeignOptions):
    pass


class UnimportedPlugin(CommHook):
    """A hook of a plugin that was not loaded."""

    Options = _PartlyKnown


class UnimportedFunction(CommHook):
    """A ``package.module:function`` that was not imported."""

    Options = _FunctionOptions


@stands_in
def unimported_hook(name: str) -> type[CommHook]:
    """The stand-in for a name; a path that cannot be one is refused."""
    if ":" not in name:
        return UnimportedPlugin
    split_path(name)
    return UnimportedFunction

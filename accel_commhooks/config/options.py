"""Option dataclasses: one documented, type-checked and range-checked field for each option of a hook.

A hook declares ``@dataclass(kw_only=True) class Options(HookOptions)`` with fields made by :func:`option`. Everything
else (errors, ``accel-commhooks show``, when bench expects the hook to act) is derived from that declaration.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import CommHookError, ConfigError, described, nearest, shown
from .values import fits_in_64_bits, problem_inside

if TYPE_CHECKING:
    from typing_extensions import Self


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    remedy: str = "",
    check: Callable[[Any], str | None] | None = None,
    aliases: tuple[str, ...] = (),
    delays_start: bool = False,
) -> Any:
    """A dataclass field for one option.

    ``check`` returns the broken rule as text, or None when the value is fine. ``aliases`` are other names for the option
    in a config. ``delays_start`` marks a number of optimizer steps before the hook acts.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "remedy": remedy,
        "check": check,
        "aliases": aliases,
        "delays_start": delays_start,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class HookOptions:
    """The options that every hook has."""

    ranks_per_node: int | None = option(
        None,
        "Ranks per node; detected from the hosts when not given.",
        at_least=1,
        remedy="leave it out to detect it",
    )
    check_every: int = option(
        100, "Reductions between two comparisons of what all ranks must have in common; 0 for none.", at_least=0
    )
    on_disagreement: str = option(
        "error",
        "What to do where ranks differ: error, or repair: go on with what rank 0 has.",
        choices=("error", "repair"),
    )

    def __post_init__(self) -> None:
        for name, annotation in _annotations(type(self)).items():
            field = self.__dataclass_fields__[name]
            given = getattr(self, name)
            value = _coerce(given, annotation)
            setattr(self, name, value)
            problem = (
                problem_inside(name, given)
                or (problem_inside(name, value) if value is not given else None)
                or _problem(name, value, annotation, field.metadata)
            )
            if problem is not None:
                remedy = field.metadata["remedy"]
                raise ConfigError(problem + (f"; {remedy}" if remedy else ""))
        self.check()

    def check(self) -> None:
        """Rules that concern several options at once; raise ConfigError."""

    # When the hook acts. Bench arranges its turns by these.

    def cycle(self) -> int:
        """Optimizer steps after which the hook has done everything that it does."""
        return 1

    def lead(self) -> int:
        """Optimizer steps until everything that overlaps several steps is under way."""
        return 1

    def starting_by(self, step: int) -> dict[str, Any]:
        """The options to change for the hook to act from optimizer step ``step`` on; empty if it does so already."""
        return {
            field.name: step
            for field in dataclasses.fields(self)
            if field.metadata["delays_start"] and (getattr(self, field.name) or 0) > step
        }

    @classmethod
    def describe(cls) -> list[tuple[str, str, Any, str]]:
        """``(name, type, default, documentation)`` for each option, the hook's own first."""
        rows = []
        for field in dataclasses.fields(cls):
            default = field.default_factory() if callable(field.default_factory) else field.default
            documentation = field.metadata["doc"]
            if field.metadata["aliases"]:
                documentation += f" Also called {', '.join(field.metadata['aliases'])}."
            rows.append((field.name, _type_name(_annotations(cls)[field.name]), default, documentation))
        own = [row for row in rows if row[0] not in HookOptions.__dataclass_fields__]
        return own + [row for row in rows if row[0] in HookOptions.__dataclass_fields__]

    @classmethod
    def build(cls, hook_name: str, values: dict[str, Any]) -> Self:
        """The options of ``hook_name`` from a plain mapping, with a readable error for a name that does not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        names = {
            alias: field.name for field in dataclasses.fields(cls) for alias in (field.name, *field.metadata["aliases"])
        }
        given: dict[str, str] = {}
        for name, value in values.items():
            if name not in names:
                raise ConfigError(
                    f"hook '{hook_name}' has no option {shown(name)}{nearest(name, known)}\n"
                    f"  its options: {', '.join(sorted(known))}"
                )
            earlier = given.get(names[name])
            if earlier is not None and value is None:
                continue
            if earlier is not None and values[earlier] is not None:
                raise ConfigError(
                    f"'{earlier}' and '{name}' are two names for one option of hook '{hook_name}', but both are set "
                    f"({earlier}: {shown(values[earlier])}, {name}: {shown(value)}); keep {names[name]}"
                )
            given[names[name]] = name
        try:
            return cls(**{option_name: values[name] for option_name, name in given.items()})
        except ConfigError as error:
            aliases = {option: name for option, name in given.items() if name != option and option in error.text}
            renamed = [f"{name} is another name for {option}" for option, name in aliases.items()]
            raise ConfigError("; ".join([error.text, *renamed])) from None
        except CommHookError:
            raise
        except Exception as error:  # a rule of the hook's own that did not expect such a value
            raise ConfigError(
                f"the options of hook '{hook_name}' cannot be checked: {described(error)}; they are {shown(values)}"
            ) from error


def _annotations(cls: type) -> dict[str, Any]:
    return {k: v for k, v in typing.get_type_hints(cls).items() if k in cls.__dataclass_fields__}  # type: ignore[attr-defined]


def _coerce(value: Any, annotation: Any) -> Any:
    """Accept an int for a float (YAML writes 1 for 1.0) and 1e-8, which YAML 1.1 reads as a string; convert nothing else."""
    if float in _alternatives(annotation) and str not in _alternatives(annotation):
        if isinstance(value, int) and not isinstance(value, bool) and int not in _alternatives(annotation):
            return float(value) if fits_in_64_bits(value) else value
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                return value
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_instance(value: Any, annotation: Any) -> bool:
    for alternative in _alternatives(annotation):
        if alternative is Any:
            return True
        expected = typing.get_origin(alternative) or alternative
        if isinstance(value, bool) and expected is not bool:
            continue
        if isinstance(value, expected):
            return True
    return False


def _type_name(annotation: Any) -> str:
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "nothing"}
    words = []
    for alternative in _alternatives(annotation):
        plain = getattr(typing.get_origin(alternative) or alternative, "__name__", str(alternative))
        words.append({"dict": "mapping"}.get(plain, names.get(plain, plain)))
    return " or ".join(word for word in words if word != "nothing") or "nothing"


def _problem(name: str, value: Any, annotation: Any, rule: Any) -> str | None:
    if not _is_instance(value, annotation):
        return f"{name} must be a {_type_name(annotation)}, but got {shown(value)} ({type(value).__name__})".replace(
            "be a true or false", "be true or false"
        )
    if rule["choices"] is not None and value not in rule["choices"]:
        allowed = [str(choice) for choice in rule["choices"] if choice is not None]
        return f"{name} must be one of {', '.join(allowed)}, but got {shown(value)}{nearest(str(value), allowed)}"
    if value is None:
        return None
    for key, words, broken in (
        ("at_least", "at least", lambda v, b: v < b),
        ("at_most", "at most", lambda v, b: v > b),
        ("above", "above", lambda v, b: v <= b),
    ):
        bound = rule[key]
        if bound is not None and isinstance(value, (int, float)) and broken(value, bound):
            return f"{name} must be {words} {bound}, but got {value}"
    if rule["check"] is not None:
        return rule["check"](value)
    return None

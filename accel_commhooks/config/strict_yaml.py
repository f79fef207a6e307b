"""Strict YAML: text to plain data, or a ConfigError that names the line, in bounded time.

YAML 1.1 as PyYAML's safe loader reads it, but for what is more often a mistake than meant: a key that is written twice,
numbers with base 60 (``1:30:00`` is 5400), dates, tags, aliases of themselves. The parser's events are counted before anything
is built, because what a few aliases or brackets unfold to can exhaust the memory or the stack.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml

from .errors import ConfigError, described, shown
from .values import fits_in_64_bits

LARGEST = 64 * 1024
"""Bytes of a config file."""
DEEPEST = 30
"""Lists and mappings inside each other, aliases unfolded."""
MOST_VALUES = 5_000
"""Values in a file, aliases unfolded; a long text counts as several."""

_TAG = "tag:yaml.org,2002:"
_INT, _FLOAT, _STR, _MERGE = (_TAG + kind for kind in ("int", "float", "str", "merge"))
_SCALARS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null")}
_TEXT_HERE = {_TAG + kind for kind in ("timestamp", "value")}
_LETTERS_PER_VALUE = 64


class _Refused(Exception):
    """What is wrong, and the line, counted from 0."""

    def __init__(self, text: str, line: int):
        super().__init__(text)
        self.line = line


def read_yaml(text: str, where: str) -> Any:
    """The data in a YAML text; ``where`` begins the error if there is none."""
    if len(text) > LARGEST:
        raise ConfigError(f"{where} is too large: a config has at most {LARGEST} bytes")
    try:
        _measure(text)
        loader = _strict_loader()(text)
        try:
            return loader.strict_data()
        finally:
            loader.dispose()
    except _Refused as error:
        raise ConfigError(f"{where}, line {error.line + 1}: {error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason[:400]}") from None
    except Exception as error:  # PyYAML lets what int(), chr() and encoders raise pass
        raise ConfigError(f"{where} is not valid YAML: {described(error)}") from error


def _measure(text: str) -> None:
    """Refuse what is nested too deep, or too large once its aliases are unfolded; costs no more than reading the text."""
    anchored: dict[str | None, tuple[int, int]] = {}  # anchor to (values, depth) of what it names
    open_ones: list[list[Any]] = [[None, 0, 0]]  # [anchor, values, depth] of the collections around the event
    for event in yaml.parse(text, Loader=_strict_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append([event.anchor, 1, 1])
            values, depth = 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, depth = open_ones.pop()
            anchored[anchor] = values, depth
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _, _ in open_ones):
                raise _Refused(
                    f"the alias *{event.anchor} stands inside what it names; write the value out", _line(event)
                )
            values, depth = anchored.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            values, depth = 1 + len(event.value) // _LETTERS_PER_VALUE, 0
            anchored[event.anchor] = values, depth
        else:
            continue
        around = open_ones[-1]
        around[1] += values
        around[2] = max(around[2], depth + 1)
        if len(open_ones) - 1 + depth > DEEPEST:
            raise _Refused(
                f"lists and mappings are nested more than {DEEPEST} deep; a config needs two or three", _line(event)
            )
        if around[1] > MOST_VALUES:
            raise _Refused(
                f"there are more than {MOST_VALUES} values, aliases unfolded; shorten the file", _line(event)
            )


def _line(part: Any) -> int:
    return part.start_mark.line


_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _strict_loader(base: Any = _SAFE_LOADER) -> Any:
    """The strict loader on top of a safe loader of PyYAML's, the one in C where there is one."""

    class StrictLoader(base):
        def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
            """The tag of a value without one. Dates, times and numbers with base 60 are text."""
            tag = super().resolve(kind, value, implicit)
            return _STR if tag in _TEXT_HERE or (tag in (_INT, _FLOAT) and ":" in value) else tag

        def strict_data(self) -> Any:
            root = self.get_single_node()
            if root is None:
                return None
            self.refuse_mistakes(root)
            return self.construct_document(root)

        def refuse_mistakes(self, root: yaml.Node) -> None:
            """Before PyYAML merges mappings: afterwards, keys that were overridden on purpose are there twice."""
            pending, seen = [root], set()
            while pending:
                node = pending.pop()
                if node in seen:
                    continue
                seen.add(node)
                if isinstance(node, yaml.MappingNode):
                    self.refuse_keys(node)
                    pending.extend(value for _, value in node.value)
                elif isinstance(node, yaml.SequenceNode):
                    pending.extend(node.value)
                if isinstance(node, yaml.ScalarNode):
                    self.scalar(node)
                elif node.tag not in (_TAG + "map", _TAG + "seq"):
                    raise _tagged(node)

        def refuse_keys(self, node: yaml.MappingNode) -> None:
            lines: dict[Any, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise _Refused("a list or a mapping cannot be a key; a key is a word before a colon", _line(key))
                value = key.value if key.tag == _MERGE else self.scalar(key)
                if value in lines:
                    raise _Refused(
                        f"the key {shown(key.value)} was given in line {lines[value] + 1} already; keep one of them",
                        _line(key),
                    )
                lines[value] = _line(key)

        def scalar(self, node: yaml.ScalarNode) -> Any:
            if node.tag not in _SCALARS:
                raise _tagged(node)
            if node.tag in (_INT, _FLOAT) and ":" in node.value:
                raise _Refused(
                    f"{shown(node.value)} is not a number that is read here; write it in base 10", _line(node)
                )
            try:
                value = self.construct_object(node)
                if value is None and super().resolve(yaml.ScalarNode, node.value, (True, False)) != node.tag:
                    raise ValueError  # PyYAML takes any text after !!null
            except Exception:
                kind = {_INT: "a whole number", _FLOAT: "a number"}.get(node.tag, node.tag.removeprefix(_TAG))
                raise _Refused(
                    f"{shown(node.value)} cannot be read as {kind}; correct it, or quote it", _line(node)
                ) from None
            if isinstance(value, int) and not fits_in_64_bits(value):
                raise _Refused(
                    f"whole numbers must fit in 64 bits, but got {shown(node.value)}; quote a text", _line(node)
                )
            return value

    return StrictLoader


def _tagged(node: yaml.Node) -> _Refused:
    tag = node.tag.replace(_TAG, "!!")
    return _Refused(
        f"{shown(tag)} is refused: a config holds text, numbers, true, false, null, lists and mappings; remove the tag",
        _line(node),
    )

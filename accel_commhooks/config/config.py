"""CommHookConfig: a hook's name and options, the same from a YAML file, a mapping or the environment.

.. code-block:: yaml

    comm_hook:
      name: powersgd
      matrix_approximation_rank: 4
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .errors import ConfigError, nearest, shown
from .options import HookOptions
from .registry import available_hooks, get_hook
from .strict_yaml import LARGEST, read_yaml

ENVIRONMENT_VARIABLE = "ACCELERATE_COMM_HOOK"
SECTION = "comm_hook"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class CommHookConfig:
    """A validated choice of hook: constructing one raises ConfigError for anything that cannot work."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"the hook's name must be text, but got {shown(self.name)}\n  hooks: {', '.join(available_hooks())}"
            )
        object.__setattr__(self, "options", _as_options(self.options))
        self.build_options()

    def build_options(self) -> HookOptions:
        """The hook's options dataclass, defaults filled in."""
        return get_hook(self.name).Options.build(self.name, self.options)

    @classmethod
    def load(cls, source: CommHookConfig | dict | str | os.PathLike | None = None, **options: Any) -> CommHookConfig:
        """From a name, a path, a mapping, a config, or None for the environment."""
        return cls.with_options(source, options)

    @classmethod
    def with_options(
        cls, source: CommHookConfig | dict | str | os.PathLike | None, options: dict[str, Any] | None
    ) -> CommHookConfig:
        """As :meth:`load`, with the options as a mapping; None is the same as no options."""
        options = _as_options(options)
        if source is None:
            config = cls.from_environment()
        elif isinstance(source, CommHookConfig):
            config = source
        elif isinstance(source, dict):
            config = cls.from_dict(source)
        elif isinstance(source, os.PathLike) or (isinstance(source, str) and looks_like_path(source)):
            config = cls.from_yaml(source)
        else:
            return cls(source, options)
        return cls(config.name, {**config.options, **options}) if options else config

    @classmethod
    def from_environment(cls) -> CommHookConfig:
        """From ``ACCELERATE_COMM_HOOK``: a name or a path."""
        value = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
        if not value:
            raise ConfigError(
                f"no communication hook was named: pass a name or a path, or set {ENVIRONMENT_VARIABLE} "
                f"to one\n  hooks: {', '.join(available_hooks())}"
            )
        return cls.load(value)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike) -> CommHookConfig:
        """From the ``comm_hook`` section of a YAML (or JSON) file."""
        return cls.from_dict(read_mapping(path), where=_named(path))

    @classmethod
    def from_dict(cls, mapping: dict, *, where: str = "the mapping") -> CommHookConfig:
        """From ``{"comm_hook": {"name": ..., option: ...}}``."""
        if not isinstance(mapping, dict):
            raise ConfigError(f"{where} must be a mapping with a '{SECTION}' section, but got {shown(mapping)}")
        if SECTION not in mapping:
            raise ConfigError(
                f"{where} has no '{SECTION}' section{nearest(SECTION, _words(mapping))}; it has: {_listed(mapping)}\n"
                f"  expected:\n    {SECTION}:\n      name: powersgd"
            )
        section = mapping[SECTION]
        if isinstance(section, str):
            section = {"name": section}
        if not isinstance(section, dict):
            raise ConfigError(
                f"'{SECTION}' in {where} must be a mapping or a hook's name, but got {shown(section)} "
                f"({type(section).__name__})"
            )
        if "name" not in section:
            raise ConfigError(
                f"'{SECTION}' in {where} has no 'name'{nearest('name', _words(section))}\n"
                f"  hooks: {', '.join(available_hooks())}"
            )
        options = {key: value for key, value in section.items() if key != "name"}
        try:
            return cls(section["name"], options)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.text}") from None

    def to_dict(self) -> dict[str, Any]:
        """The mapping that :meth:`from_dict` reads."""
        return {SECTION: {"name": self.name, **self.options}}


def read_mapping(path: str | os.PathLike) -> dict[str, Any]:
    """The mapping in a YAML file; a readable ConfigError for a file that is missing, empty, broken or a list."""
    file = _named(path)
    mapping = read_yaml(_read_text(path), f"the config file {file}")
    if mapping is None:
        raise ConfigError(f"the config file {file} is empty; expected:\n    {SECTION}:\n      name: powersgd")
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"the config file {file} must hold a mapping with a '{SECTION}' section, but holds a "
            f"{type(mapping).__name__}: {mapping[:80] if isinstance(mapping, str) else shown(mapping)}"
        )
    return mapping


def looks_like_path(text: str) -> bool:
    """Whether a text names a file, and not a hook."""
    return text.endswith(_FILE_ENDINGS) or os.sep in text or os.path.isfile(text)


def _read_text(path: str | os.PathLike) -> str:
    name = _named(path)
    try:
        file = Path(path)
        if file.is_dir():
            raise ConfigError(f"the config {name} is a folder; name a YAML file in it")
        if file.exists() and not file.is_file():
            # Opening a pipe may wait forever, and only one of the ranks could read it.
            raise ConfigError(f"the config {name} is not a regular file; every rank reads it, so write it to one")
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(f"the config file {name} is too large: a config has at most {LARGEST} bytes")
        return content.decode("utf-8")
    except ConfigError:
        raise
    except FileNotFoundError:
        beside = _yaml_files(file.parent)
        found = f"\n  in {file.parent}: {_listed(beside)}" if beside else ""
        raise ConfigError(f"the config file {name} does not exist{nearest(file.name, beside)}{found}") from None
    except (OSError, ValueError, TypeError) as error:  # ValueError: a NUL in the path, or bytes that are not UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the config file {name} cannot be read: {reason}") from None


def _yaml_files(folder: Path) -> list[str]:
    try:
        return sorted(file.name for file in folder.glob("*.y*ml"))
    except OSError:  # a folder that may not be read
        return []


def _as_options(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"options must be a mapping of names to values, but got {shown(options)} ({type(options).__name__}); "
            "leave them out for the defaults"
        )
    return dict(options)


def _named(path: object) -> str:
    """A path as messages show it."""
    text = str(path)
    return text if text.isprintable() and len(text) < 300 else shown(text)


def _words(keys: Iterable[Any]) -> list[str]:
    return [key for key in islice(keys, 1000) if isinstance(key, str)]


def _listed(keys: Iterable[Any]) -> str:
    """The first keys, with commas between them."""
    words = [key if isinstance(key, str) and len(key) < 60 else shown(key) for key in islice(keys, 21)]
    return ", ".join(words[:20] + ["..."] * (len(words) > 20)) or "nothing"

"""CommHookConfig: a hook's name and options, the same from a YAML file, a mapping or the environment.

.. code-block:: yaml

    comm_hook:
      name: powersgd
      matrix_approximation_rank: 4
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, nearest
from .options import HookOptions
from .registry import available_hooks, get_hook

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
                f"the hook's name must be text, but got {self.name!r}\n  hooks: {', '.join(available_hooks())}"
            )
        self.build_options()

    def build_options(self) -> HookOptions:
        """The hook's options dataclass, defaults filled in."""
        return get_hook(self.name).Options.build(self.name, self.options)

    @classmethod
    def load(cls, source: CommHookConfig | dict | str | os.PathLike | None = None, **options: Any) -> CommHookConfig:
        """From a name, a path, a mapping, a config, or None for the environment."""
        if source is None:
            config = cls.from_environment()
        elif isinstance(source, CommHookConfig):
            config = source
        elif isinstance(source, dict):
            config = cls.from_dict(source)
        elif isinstance(source, os.PathLike) or looks_like_path(str(source)):
            config = cls.from_yaml(source)
        else:
            config = cls(str(source), options)
            return config
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
        return cls.from_dict(read_mapping(path), where=f"{path}")

    @classmethod
    def from_dict(cls, mapping: dict, *, where: str = "the mapping") -> CommHookConfig:
        """From ``{"comm_hook": {"name": ..., option: ...}}``."""
        if not isinstance(mapping, dict):
            raise ConfigError(f"{where} must be a mapping with a '{SECTION}' section, but got {mapping!r}")
        if SECTION not in mapping:
            keys = ", ".join(str(key) for key in mapping) or "nothing"
            raise ConfigError(
                f"{where} has no '{SECTION}' section{nearest(SECTION, map(str, mapping))}; it has: {keys}\n"
                f"  expected:\n    {SECTION}:\n      name: powersgd"
            )
        section = mapping[SECTION]
        if isinstance(section, str):
            return cls(section)
        if not isinstance(section, dict):
            raise ConfigError(
                f"'{SECTION}' in {where} must be a mapping or a hook's name, but got {section!r} "
                f"({type(section).__name__})"
            )
        if "name" not in section:
            raise ConfigError(
                f"'{SECTION}' in {where} has no 'name'{nearest('name', map(str, section))}\n"
                f"  hooks: {', '.join(available_hooks())}"
            )
        options = {str(key): value for key, value in section.items() if key != "name"}
        try:
            return cls(section["name"], options)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.text}") from None

    def to_dict(self) -> dict[str, Any]:
        """The mapping that :meth:`from_dict` reads."""
        return {SECTION: {"name": self.name, **self.options}}


def read_mapping(path: str | os.PathLike) -> dict[str, Any]:
    """The mapping in a YAML file; a readable ConfigError for a file that is missing, empty, broken or a list."""
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"the config {file} is a folder; name a YAML file in it")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = sorted(p.name for p in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        found = f"\n  in {file.parent}: {', '.join(beside)}" if beside else ""
        raise ConfigError(f"the config file {file} does not exist{nearest(file.name, beside)}{found}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {file} cannot be read: {error}") from None
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {file} is not valid YAML: {reason}") from None
    if mapping is None:
        raise ConfigError(f"the config file {file} is empty; expected:\n    {SECTION}:\n      name: powersgd")
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"the config file {file} must hold a mapping with a '{SECTION}' section, but holds a "
            f"{type(mapping).__name__}: {str(mapping)[:80]}"
        )
    return mapping


def looks_like_path(text: str) -> bool:
    """Whether a text names a file, and not a hook."""
    return text.endswith(_FILE_ENDINGS) or os.sep in text or os.path.isfile(text)

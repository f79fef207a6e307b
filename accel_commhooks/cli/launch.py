"""``accel-commhooks launch``: ``accelerate launch`` with a config file that also has a ``comm_hook`` section.

Accelerate refuses keys it does not know, so it is given the file without that section; the section travels in a file of
its own, which ``-m accel_commhooks`` reads in every process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import yaml
from accelerate.commands.launch import launch_command, launch_command_parser

from ..config.config import ENVIRONMENT_VARIABLE, SECTION, CommHookConfig, read_mapping
from ..config.errors import ConfigError

NAME = "launch"


def add_parser(subparsers) -> None:
    subparsers.add_parser(NAME, help="accelerate launch, with a comm_hook section in its config file", add_help=False)


def run(arguments: argparse.Namespace) -> None:
    parser = launch_command_parser()
    parsed = parser.parse_args(arguments.arguments)
    if parsed.no_python:
        raise ConfigError("--no_python runs a program that is not Python, where no hook can be installed; leave it out")
    with tempfile.TemporaryDirectory(prefix="accel_commhooks_") as folder:
        hook = _split_config(parsed, Path(folder))
        if hook is not None:
            _put_us_in_between(parsed, hook)
        launch_command(parsed)


def _split_config(parsed: argparse.Namespace, folder: Path) -> str | None:
    """The hook's config, and ``parsed.config_file`` pointed at the rest; without a section, the environment's choice."""
    if parsed.config_file is not None:
        mapping = read_mapping(parsed.config_file)
        if SECTION in mapping:
            CommHookConfig.from_dict(mapping, where=parsed.config_file)
            rest = {key: value for key, value in mapping.items() if key != SECTION}
            (folder / "accelerate.yaml").write_text(yaml.safe_dump(rest))
            (folder / "comm_hook.yaml").write_text(yaml.safe_dump({SECTION: mapping[SECTION]}))
            parsed.config_file = str(folder / "accelerate.yaml")
            return str(folder / "comm_hook.yaml")
    source = os.environ.get(ENVIRONMENT_VARIABLE)
    if source is None:
        raise ConfigError(
            f"no hook is named: the config file ({parsed.config_file or 'none given'}) has no '{SECTION}' section and "
            f"{ENVIRONMENT_VARIABLE} is not set; add the section, or use `accelerate launch` itself"
        )
    CommHookConfig.load(source)
    return source


def _put_us_in_between(parsed: argparse.Namespace, hook: str) -> None:
    """``train.py args`` becomes ``-m accel_commhooks HOOK train.py args``, likewise for a module."""
    script = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    parsed.training_script_args = [hook, *script, *parsed.training_script_args]
    parsed.training_script, parsed.module = "accel_commhooks", True

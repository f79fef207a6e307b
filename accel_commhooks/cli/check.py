"""``accel-commhooks check FILE``: whether a config is valid, and what it is with all defaults filled in."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import yaml

from ..config.config import SECTION, CommHookConfig
from ..config.registry import without_foreign_code


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("check", help="check a config file and print it with all defaults filled in")
    parser.add_argument("file")
    parser.add_argument(
        "--no-import", action="store_true", help="run no foreign code: import neither plugins nor a module:function"
    )
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    guard: contextlib.AbstractContextManager[list[str]] = contextlib.nullcontext([])
    if arguments.no_import:
        guard = without_foreign_code()
    with guard as not_checked:
        config = CommHookConfig.load(arguments.file)
        options = {k: v for k, v in dataclasses.asdict(config.build_options()).items() if v is not None}
    for note in not_checked:
        print(f"# {note}")
    if not_checked:
        options = {**config.options, **options}
    print(yaml.safe_dump({SECTION: {"name": config.name, **options}}, sort_keys=False), end="")

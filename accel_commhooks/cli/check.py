"""``accel-commhooks check FILE``: whether a config is valid, and what it is with all defaults filled in."""

from __future__ import annotations

import argparse
import dataclasses

import yaml

from ..config.config import SECTION, CommHookConfig


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("check", help="check a config file and print it with all defaults filled in")
    parser.add_argument("file")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    config = CommHookConfig.load(arguments.file)
    options = {k: v for k, v in dataclasses.asdict(config.build_options()).items() if v is not None}
    print(yaml.safe_dump({SECTION: {"name": config.name, **options}}, sort_keys=False), end="")

"""``accel-commhooks show NAME``: a hook's options with types, defaults and documentation."""

from __future__ import annotations

import argparse
import inspect

from ..config.registry import get_hook


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("show", help="show a hook's options")
    parser.add_argument("name")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    hook = get_hook(arguments.name)
    print(inspect.getdoc(hook))
    print(f"\ncomm_hook:\n  name: {arguments.name}")
    for name, kind, default, documentation in hook.Options.describe():
        print(f"  {name}: {_yaml(default)}  # {kind}. {documentation}")


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)

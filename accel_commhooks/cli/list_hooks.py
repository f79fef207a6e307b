"""``accel-commhooks list``: the hooks that are available here."""

from __future__ import annotations

import argparse
import inspect

from ..config.registry import available_hooks, get_hook


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("list", help="list the hooks, third-party ones included")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    names = available_hooks()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {(inspect.getdoc(get_hook(name)) or '').splitlines()[0]}")
    print("\nAlso: torch:FUNCTION for torch's own hooks, package.module:function for yours.")

"""``accel-commhooks advise RESULT.json``: which of the measured hooks to use, and why."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("advise", help="recommend a hook from a bench result")
    parser.add_argument("result")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    from ..bench.advise import advise
    from ..bench.report import read_result

    print("\n".join(advise(read_result(arguments.result))))

"""``accel-commhooks verify``: see verify/run.py. Outside a launcher it starts the ranks of this machine itself."""

from __future__ import annotations

import argparse
import contextlib
import os

NAME = "verify"


def add_parser(subparsers) -> None:
    from ..bench.ranks import add_ranks_argument
    from ..verify.run import add_arguments

    parser = subparsers.add_parser(NAME, help="prove that the hooks work on the devices and the backend at hand")
    add_arguments(parser)
    add_ranks_argument(parser)
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import ranks
    from ..verify import run as verify
    from ..verify.report import record_death

    if ranks.is_launched() or arguments.list:
        return verify.main(ranks.words_of(arguments))
    verify.parse(arguments)  # a typo is reported once, before any rank is started
    with contextlib.suppress(FileNotFoundError):
        os.remove(arguments.output)  # that of an earlier run must not be taken for this one's
    code = ranks.run_here("accel_commhooks.verify", ranks.words_of(arguments), arguments.ranks)
    line = record_death(arguments.output) if code else None
    if line is not None:
        print(f"{line}\nwritten to {arguments.output}")
    return min(code, 1)

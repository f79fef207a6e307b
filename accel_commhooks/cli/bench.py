"""``accel-commhooks bench``: see bench/run.py. Outside a launcher it starts the ranks of this machine itself."""

from __future__ import annotations

import argparse

NAME = "bench"


def add_parser(subparsers) -> None:
    from ..bench.ranks import add_ranks_argument
    from ..bench.run import add_arguments

    parser = subparsers.add_parser(NAME, help="measure hooks against each other on this cluster")
    add_arguments(parser)
    add_ranks_argument(parser)
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import ranks
    from ..bench import run as bench
    from ..bench.contenders import parse_hooks

    if ranks.is_launched():
        return bench.main(ranks.words_of(arguments))
    parse_hooks(arguments.hooks)  # a typo is reported once, before any rank is started
    return ranks.run_here("accel_commhooks.bench", ranks.words_of(arguments), arguments.ranks)

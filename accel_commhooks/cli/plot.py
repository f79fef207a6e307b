"""``accel-commhooks plot RESULT.json...``: pictures of bench results and of training logs."""

from __future__ import annotations

import argparse


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("plot", help="draw results of bench and logs of training runs, as PNG and SVG")
    parser.add_argument("files", nargs="+", metavar="RESULT.json", help="a bench result or a trainer_state.json")
    parser.add_argument("--output", default=".", metavar="FOLDER", help="where the pictures go (default: here)")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> None:
    from ..bench.plot import plot

    for path in plot(arguments.files, arguments.output):
        print(path)

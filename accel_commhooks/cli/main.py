"""The ``accel-commhooks`` command: wires the subcommands, each of which is one parser and one function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..config.errors import CommHookError
from . import advise, bench, check, launch, list_hooks, plot, show, verify

COMMANDS = (list_hooks, show, check, launch, verify, bench, advise, plot)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "accel-commhooks", description="Communication hooks for Accelerate and Transformers."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [launch.NAME]:  # every flag is Accelerate's own
        parsed = argparse.Namespace(function=launch.run, arguments=given[1:])
    else:
        parsed = parser.parse_args(given)
    if "function" not in parsed:
        parser.print_help()
        return 1
    try:
        return parsed.function(parsed) or 0
    except CommHookError as error:
        print(f"accel-commhooks: {error.text}", file=sys.stderr)
        return 2

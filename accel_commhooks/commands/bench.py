"""``accel-commhooks bench``: see bench.py. Outside a launcher it starts the ranks of this machine itself."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

NAME = "bench"


def add_parser(subparsers) -> None:
    from ..bench import add_arguments

    parser = subparsers.add_parser(NAME, help="measure hooks against each other on this cluster")
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, help="processes to start, outside a launcher (default: GPUs, or 2)")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    from .. import bench

    words = [
        word
        for name, value in vars(arguments).items()
        if name not in ("function", "command", "ranks") and value is not None
        for word in (f"--{name}", str(value))
    ]
    if "RANK" in os.environ:
        return bench.main(words)
    bench.parse_hooks(arguments.hooks)  # a typo is one message here, before anything is started
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", _ranks(arguments)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen([*launcher, "-m", "accel_commhooks.bench", *words], env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the ranks got it too; what they have measured is in the file
            continue


def _ranks(arguments: argparse.Namespace) -> str:
    import torch

    return str(arguments.ranks or max(2, torch.accelerator.device_count() if torch.accelerator.is_available() else 0))

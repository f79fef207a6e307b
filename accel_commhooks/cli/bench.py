"""``accel-commhooks bench``: see bench/run.py. Outside a launcher it starts the ranks of this machine itself."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time

NAME = "bench"


def add_parser(subparsers) -> None:
    from ..bench.run import add_arguments

    parser = subparsers.add_parser(NAME, help="measure hooks against each other on this cluster")
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, help="processes to start (default: one per GPU, at least 2)")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import run as bench
    from ..bench.contenders import parse_hooks

    words = [
        word
        for name, value in vars(arguments).items()
        if name not in ("function", "command", "ranks") and value is not None
        for word in (f"--{name}", str(value))
    ]
    if "RANK" in os.environ:
        return bench.main(words)
    parse_hooks(arguments.hooks)  # a typo is reported once, before any rank is started
    return _run_ranks([sys.executable, "-m", "accel_commhooks.bench", *words], arguments.ranks or _default_ranks())


def _default_ranks() -> int:
    import torch

    return max(2, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _run_ranks(command: list[str], ranks: int) -> int:
    """Start the ranks and wait for them; a rank that fails ends the others, and Ctrl-C reaches all of them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared, "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    while True:
        try:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
        except KeyboardInterrupt:
            continue
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    return next((code for code in (process.wait() for process in processes) if code), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""The ranks of a command: those that a launcher has described, or those of this machine, started here."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..comm import process_group
from ..config.errors import ConfigError

FINISH_SECONDS = 25.0
"""How long the other ranks may go on after one has failed: rank 0 may still have to report that."""


def add_ranks_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes to start (default: one per GPU, at least 2)")


def open_ranks(command: str = "bench", **group: Any) -> torch.device:
    """Join the process group that the launcher described; returns this rank's device.

    ``group`` goes to ``init_process_group``.
    """
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), **group)
    if not process_group.is_initialized():
        raise ConfigError(
            f"{command} needs at least two processes, but got one; start it with `accelerate launch --num_processes 2 -m "
            f"accel_commhooks.{command}`, or with `accel-commhooks {command}`"
        )
    return state.device if state.device.type != "cpu" else torch.device("cpu")


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Parsed arguments as words of a command line again, without those of the command that starts ranks."""
    words: list[str] = []
    for name, value in vars(arguments).items():
        if name in ("function", "command", "ranks") or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def is_launched() -> bool:
    """Whether this process is one of a launcher's ranks."""
    return "RANK" in os.environ


def run_here(module: str, words: Sequence[str], ranks: int | None) -> int:
    """Run ``python -m module words`` in the ranks of this machine; returns the exit code of the first that failed, or 0."""
    if ranks is not None and ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, but got {ranks}; leave it out for one per GPU, at least 2")
    return _run_ranks([sys.executable, "-m", module, *words], ranks or _default_ranks())


def _default_ranks() -> int:
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
    died = {rank: code for rank, code in enumerate(codes) if code is not None and code < 0}
    deadline = time.monotonic() + (5 if codes[0] is not None else FINISH_SECONDS)
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for rank, code in died.items():
        print(f"accel-commhooks: rank {rank} died of signal {-code}; the others were ended", file=sys.stderr)
    return next((abs(code) for code in (process.wait() for process in processes) if code), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

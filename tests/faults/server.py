"""Ranks for one case, forked from a process that has imported everything and done nothing.

A rank costs a few hundredths of a second that way, so that a thousand faults fit into minutes. A fork copies one thread only:
nothing here may start a thread or a process group before it forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import logging
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, not in every rank
import torch.distributed as dist
from models import PlantedFailure

from accel_commhooks.comm.survivors import ANSWER_SECONDS
from accel_commhooks.config.errors import CommHookError, LostRankError
from accel_commhooks.config.registry import available_hooks

TIMEOUT = 4.0
"""Of every process group, in seconds."""
PATIENCE = TIMEOUT + ANSWER_SECONDS + 5
"""A survivor has ended by then, counted from the fault: the timeout, the roll call after it, and a busy machine."""
LIMIT = PATIENCE + 8
"""The same, counted from the start of the ranks."""

Note = Callable[[str, Any], None]


@dataclass
class Outcome:
    """What became of a rank."""

    ended: str = "hung"
    """finished, failed, killed (by itself or by us after it was stopped) or hung"""
    value: Any = None
    error: str = ""
    """Of a failure: the class and the text."""
    named: bool = False
    """Whether it is an error of this package that says what happened."""
    planted: bool = False
    where: str = ""
    """Of a failure: the traceback; of a hung rank: its stack."""
    at: float = 0.0
    log: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def import_everything() -> None:
    """In the process that forks."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    available_hooks()
    import accel_commhooks.hooks.local_sgd.hook
    import accel_commhooks.hooks.powersgd.batched
    import accel_commhooks.hooks.powersgd.hook
    import accel_commhooks.hooks.zero.hook  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a rank looks at its own objects only, and does not copy the memory of all others


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, struck: set[int] | None = None, limit: float = LIMIT
) -> list[Outcome]:
    """``function(rank, world, note, *args)`` in as many forked ranks. ``struck`` ones may die or stop: they are not waited for.

    What a rank tells by ``note(key, value)`` is known even if it is killed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="case_", dir=shared_memory()) as folder:
        ours, theirs = os.pipe()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.close(theirs)
                _be_rank(function, rank, world, Path(folder), ours, args)
            pids.append(pid)
        try:
            return _wait(pids, Path(folder), struck or set(), time.monotonic() + limit)
        finally:
            os.close(ours)
            os.close(theirs)


def shared_memory() -> str | None:
    """A folder in memory, where there is one: checkpoints are flushed to the disk, which takes longer than all else."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _wait(pids: list[int], folder: Path, struck: set[int], deadline: float) -> list[Outcome]:
    codes: dict[int, int] = {}
    survivors = [rank for rank in range(len(pids)) if rank not in struck]

    def has_ended(rank: int) -> bool:
        return rank in codes or (folder / f"result_{rank}").exists()

    def was_struck(rank: int) -> bool:
        """A slow rank may get there when the others have done all that they need it for."""
        return has_ended(rank) or "struck" in _notes(folder, rank)

    for ready in (lambda: all(map(has_ended, survivors)), lambda: all(map(was_struck, struck))):
        while time.monotonic() < deadline and not ready():
            _reap(pids, codes)
            time.sleep(0.03)
    hung = [r for r in survivors if r not in codes and not (folder / f"result_{r}").exists()]
    for rank in hung:
        os.kill(pids[rank], signal.SIGUSR1)  # shows its stack
    if hung:
        time.sleep(0.5)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            codes[rank] = os.waitpid(pid, 0)[1]
    return [_outcome(folder, rank, rank in hung) for rank in range(len(pids))]


def _reap(pids: list[int], codes: dict[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in codes:
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = code


def _outcome(folder: Path, rank: int, hung: bool) -> Outcome:
    result = folder / f"result_{rank}"
    outcome: Outcome = pickle.loads(result.read_bytes()) if result.exists() else Outcome("hung" if hung else "killed")
    if hung:
        outcome.where = (folder / f"stack_{rank}").read_text()
    outcome.notes.update(_notes(folder, rank))
    return outcome


def _notes(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has told so far; it may be about to tell more."""
    file, notes = folder / f"notes_{rank}", {}
    if file.exists():
        stream = io.BytesIO(file.read_bytes())
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                notes.update([pickle.load(stream)])
    return notes


# In the rank.


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def _be_rank(
    function: Callable[..., Any], rank: int, world: int, folder: Path, everybody_done: int, args: tuple
) -> None:
    """Never returns."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    stack = (folder / f"stack_{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    _silence()
    keep, logger = _Keep(), logging.getLogger("accel_commhooks")
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    notes = (folder / f"notes_{rank}").open("wb")

    def note(key: str, value: Any) -> None:
        notes.write(pickle.dumps((key, value)))
        notes.flush()

    outcome = Outcome("finished")
    try:
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )
        outcome.value = function(rank, world, note, *args)
    except BaseException as error:
        outcome = failure(error)
    outcome.at, outcome.log = time.monotonic(), keep.records
    unfinished = folder / f"unfinished_{rank}"
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(folder / f"result_{rank}")
    if outcome.ended == "finished":
        os.read(everybody_done, 1)  # a rank that leaves early would break the last collective of a slower one
    os._exit(outcome.ended != "finished")


def failure(error: BaseException) -> Outcome:
    """How a rank has failed."""
    text = error.text if isinstance(error, CommHookError) else str(error)
    return Outcome(
        "failed",
        error=f"{type(error).__name__}: {text}",
        named=isinstance(error, (CommHookError, LostRankError)),
        planted=isinstance(error, PlantedFailure),
        where="".join(traceback.format_exception(error)),
    )


def _silence() -> None:
    """Gloo and torch say on stderr what the outcome says too."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

"""Who is still there when a collective has failed.

Every rank leaves its process id in the store. When a collective fails, a rank looks at the processes on its own machine, tells
the others what it saw, and reads what they tell. A rank on another machine where nobody has noticed anything yet is known
by its silence only: it may be lost, or still wait for somebody that it does not know to be lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ..config.errors import LostRankError
from .roll_call import RollCall, named
from .topology import host_key

ANSWER_SECONDS = 3.0
"""How long a rank whose collective failed waits for the others to tell what they saw."""
STORE_SECONDS = 2.0
"""How long the store itself may take to answer."""


@dataclass(frozen=True)
class Group:
    """Some ranks of a communicator. ``process_group`` is None for a group of one, which never communicates."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup
    """The communicator's own group."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def introduce(process_group: dist.ProcessGroup) -> None:
    """Leave this process's id for the others."""
    RollCall(process_group, "process").answer({"machine": _machine(), "pid": os.getpid()})


@contextmanager
def lost_ranks_named(group: Group) -> Iterator[None]:
    """Where a collective fails: name the ranks that are lost."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # torch's DistBackendError is one too
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LostRankError(f"{_who_is_lost(group)}\n  the collective failed with: {first_line}") from error


def _who_is_lost(group: Group) -> str:
    """All ranks are asked: a rank of this group may have been kept away by one of another group."""
    failed = RollCall(group.all_ranks, "collective failed")
    if not failed.is_possible:
        return "a collective failed"
    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            answers.append(_ask(group, failed))
        except Exception as error:
            answers.append(error)

    # A store that is cut off may be waited for without an end.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS + STORE_SECONDS)
    if not answers:
        return (
            "a collective failed, and the store of the process group, which rank 0's node usually has, does not answer: "
            f"rank {failed.rank}, this one, is cut off from it, or its node was stopped"
        )
    if isinstance(answers[0], (RuntimeError, OSError)):
        return "a collective failed, and the store of the process group is gone with the rank that had it"
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _ask(group: Group, failed: RollCall) -> str:
    seen = _look_around(RollCall(group.all_ranks, "process"))
    failed.answer(seen)
    if not seen:
        failed.wait_a_while(ANSWER_SECONDS)
    told = {rank: failed.answer_of(rank) for rank in range(failed.size)}
    for each in told.values():
        seen = {**(each or {}), **seen}
    # A rank that has told of its failure may have ended by now, for that reason.
    lost = {int(rank): state for rank, state in seen.items() if told[int(rank)] is None}
    return _in_words(lost, [rank for rank in group.ranks if told[rank] is None])


def _in_words(lost: dict[int, str], silent: list[int]) -> str:
    texts = [
        f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} {state}"
        for state in dict.fromkeys(lost.values())
        if (ranks := sorted(rank for rank, each in lost.items() if each == state))
    ]
    unknown = sorted(set(silent) - set(lost))
    if unknown and not lost:
        texts.append(f"{named(unknown)}: no answer within {ANSWER_SECONDS:g} s, so killed, stopped or cut off")
    if not texts:
        texts.append("all ranks of this group are alive, and the collective failed on each: is their link down?")
    return "; ".join(texts)


def _look_around(processes: RollCall) -> dict[str, str]:
    """What became of ranks on this machine that are not well."""
    machine, seen = _machine(), {}
    for rank in range(processes.size):
        known = processes.answer_of(rank) if rank != processes.rank else None
        if known is not None and known["machine"] == machine and (state := _fate_of(known["pid"])) is not None:
            seen[str(rank)] = state
    return seen


def _fate_of(pid: int) -> str | None:
    """What happened to a process; None if it is well."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "killed"
    return {"T": "stopped", "t": "stopped", "Z": "killed", "X": "killed"}.get(state)


def _machine(pid_namespace: str = "/proc/self/ns/pid") -> str:
    """Equal in two processes that can see each other."""
    try:
        return f"{host_key()}/{os.readlink(pid_namespace)}"
    except OSError:
        return f"{host_key()}/{os.getpid()}"

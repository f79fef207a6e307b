"""Communication under way, and what to say if it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..config.errors import LostRankError
from .roll_call import RollCall, named
from .traffic import Traffic

ANSWER_SECONDS = 3.0
"""How long a rank whose collective failed waits for the others to say that theirs failed too."""

STORE_SECONDS = 2.0
"""How long the store itself may take to answer."""


@dataclass(frozen=True)
class Group:
    """Some ranks of a communicator. ``process_group`` is None for a group of one, which never communicates."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class PendingResult(Protocol):
    """Communication under way whose result can be waited for."""

    def wait(self) -> object: ...


class PendingCollective:
    """A collective under way. Keeps its tensors alive; ``wait()`` returns the result and may be called again."""

    def __init__(
        self,
        result: torch.Tensor,
        works: Sequence[dist.Work],
        group: Group,
        traffic: Traffic,
        finish: Callable[[], object] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ):
        self._result, self._works, self._group, self._traffic = result, works, group, traffic
        self._finish, self._keep = finish, keep

    def wait(self) -> torch.Tensor:
        if self._works:
            start = time.perf_counter()
            with lost_ranks_named(self._group):
                for work in self._works:
                    work.wait()
            self._traffic.waited += time.perf_counter() - start
            self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._keep = ()
        return self._result


@contextmanager
def lost_ranks_named(group: Group) -> Iterator[None]:
    """Where a collective fails: ask who is still there, and name the ranks that do not answer."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # torch's DistBackendError is one too
        raise LostRankError(f"{_first_line(error)}\n  {_who_is_left(group)}") from error


def _who_is_left(group: Group) -> str:
    assert group.process_group is not None
    call = RollCall(group.process_group, "collective failed")
    if not call.is_possible:
        return "a collective failed"
    try:
        missing = _missing(call)
    except (RuntimeError, OSError):
        return "a collective failed, and the store of the process group is gone with the rank that had it"
    if missing is None:
        return (
            f"a collective failed, and the store of the process group, which rank 0's node usually has, does not answer: "
            f"this {named([group.ranks[call.rank]])} is cut off from it, or its node was stopped"
        )
    if not missing:
        return "all ranks of this group are alive, and the collective failed on each: is their link down?"
    there = [rank for rank in range(call.size) if rank not in missing]
    return (
        f"{named([group.ranks[rank] for rank in missing])}: no answer within {ANSWER_SECONDS:g} s of a failed collective, so "
        f"killed, stopped or cut off; still there: {named([group.ranks[rank] for rank in there])}"
    )


def _missing(call: RollCall) -> list[int] | None:
    """The ranks that do not answer; None if the store does not. A store that is cut off may be waited for without an end."""
    found: list[list[int] | Exception] = []

    def ask() -> None:
        try:
            call.answer({})
            found.append(call.missing(ANSWER_SECONDS))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS + STORE_SECONDS)
    if not found:
        return None
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

"""What ranks tell each other through the store of their process group.

A collective needs every rank: one that never joins it, or joins another, leaves the others waiting or makes them fail far
from the cause. A store needs nobody. A rank leaves its answer there and reads those of the others, so a rank that is missing
or that answers something else can be named.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..config.errors import LostRankError, launched_rank
from ..upstream import groups
from .process_group import ProcessGroup, rank_in, size_of

logger = logging.getLogger("accel_commhooks")

PREFIX = "accel_commhooks"
WARN_SECONDS = 5.0
"""After this time the ranks that have not answered are named in the log."""
LOOKS = (5.1, 3.1, 20.0)
"""Seconds after which it is looked who is missing, each time. torch logs a line of its own for each."""

Answer = dict[str, Any]


class RollCall:
    """The answers of a process group's ranks to one question, which is the same text on every rank."""

    def __init__(self, process_group: ProcessGroup, question: str):
        self._store = groups.store_of(process_group)
        self._timeout = groups.timeout_of(process_group).total_seconds()
        self._question = question
        self.rank, self.size = rank_in(process_group), size_of(process_group)

    @property
    def is_possible(self) -> bool:
        """Whether there is anybody to ask, and a store."""
        return self.size > 1 and self._store is not None

    def answer(self, own: Answer) -> None:
        """Leave this rank's answer; a later one takes its place."""
        if self.is_possible:
            self._store.set(self._key(self.rank), json.dumps(own))  # type: ignore[union-attr]

    def answer_of(self, rank: int) -> Answer | None:
        """A rank's answer, or None so far."""
        if not self.is_possible or not self._store.check([self._key(rank)]):  # type: ignore[union-attr]
            return None
        return self._read([rank])[0]

    def forget(self) -> None:
        """Take this rank's answer back."""
        if self.is_possible:
            self._store.delete_key(self._key(self.rank))  # type: ignore[union-attr]

    def everyone(self, waiting_for: str, give_up: Callable[[list[int], float], None] | None = None) -> list[Answer]:
        """All answers, by rank, as soon as every rank has answered.

        ``give_up(missing ranks, seconds so far)`` is asked now and then and may raise an error; otherwise ranks are waited
        for as long as a collective of this group may take. ``waiting_for`` says in the log what they have not done.
        """
        started, warned = time.monotonic(), False
        looks = itertools.chain(LOOKS, itertools.repeat(LOOKS[-1]))
        while not self._all_here(min(next(looks), self._timeout)):
            seconds = time.monotonic() - started
            missing = [rank for rank in range(self.size) if not self._store.check([self._key(rank)])]  # type: ignore[union-attr]
            if missing and give_up is not None:
                give_up(missing, seconds)
            if missing and seconds > self._timeout:
                raise LostRankError(
                    f"{named(missing)} did not {waiting_for} within {self._timeout:g} s, the timeout of the process group"
                )
            if missing and not warned and seconds > WARN_SECONDS and launched_rank() == 0:
                warned = True
                logger.warning("waiting for %s to %s", named(missing), waiting_for)
        return self._read(range(self.size))

    def wait_for(self, rank: int) -> Answer:
        """The answer of one rank that is sure to come, unless it dies."""
        try:
            self._store.wait([self._key(rank)], timedelta(seconds=self._timeout))  # type: ignore[union-attr]
        except RuntimeError as error:
            raise LostRankError(f"rank {rank} did not answer within {self._timeout:g} s") from error
        return self._read([rank])[0]

    def pause(self) -> float:
        """Before an answer is read again that may change; returns the seconds."""
        time.sleep(0.5)
        return 0.5

    def wait_a_while(self, seconds: float) -> None:
        """Wait some seconds at most for every rank to answer."""
        self._all_here(seconds)

    def _all_here(self, seconds: float) -> bool:
        try:
            self._store.wait(  # type: ignore[union-attr]
                [self._key(rank) for rank in range(self.size)], timedelta(seconds=seconds)
            )
        except RuntimeError:  # torch's DistStoreError, in older versions RuntimeError itself
            return False
        return True

    def _read(self, ranks: Sequence[int]) -> list[Answer]:
        keys = [self._key(rank) for rank in ranks]
        store: Any = self._store
        raw = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return [json.loads(answer) for answer in raw]

    def _key(self, rank: int) -> str:
        return f"{PREFIX}/{self._question}/{rank}"


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2 and 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    last = shown.pop() if len(ranks) <= 8 else f"{len(ranks) - 8} more"
    return f"ranks {', '.join(shown)} and {last}"

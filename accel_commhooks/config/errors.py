"""Errors meant for users: the rule, the value received, the remedy. Full text on rank 0 only."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from types import TracebackType

# How long the other ranks keep quiet about a mistake that rank 0 is expected to show.
GRACE_SECONDS = 10.0


def launched_rank() -> int:
    """The rank that the launcher gave this process; 0 outside a launcher."""
    return int(os.environ.get("RANK") or 0)


def let_rank_0_speak() -> None:
    """Wait on every other rank, because a launcher kills all ranks as soon as the first one fails.

    Rank 0 may be the slower one, and would be killed before it has said anything. When it ends it takes this process
    along, so that returning from here means that rank 0 had nothing to say and this rank has to. The first rank of
    a node goes before its neighbours, which makes it one message a node at most.
    """
    if launched_rank() != 0:
        time.sleep(GRACE_SECONDS if int(os.environ.get("LOCAL_RANK") or 0) == 0 else 2 * GRACE_SECONDS)


class CommHookError(ValueError):
    """Something the user asked for cannot be done.

    Every rank raises it, or the others would hang; only rank 0 carries the whole text, so that a typo on 64 ranks
    is one screen and not 64. A function spawned by a parent (``notebook_launcher``) carries it on every rank: its
    parent shows the first failure alone.
    """

    def __init__(self, text: str):
        self.text = text
        speaks = launched_rank() == 0 or multiprocessing.parent_process() is not None
        super().__init__(text if speaks else "stopped: rank 0 shows the reason")
        if not speaks and sys.excepthook is not _after_rank_0:
            global _excepthook
            _excepthook = sys.excepthook
            sys.excepthook = _after_rank_0


_excepthook = sys.excepthook


def _after_rank_0(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """What an uncaught error meets on the other ranks: patience, then its whole text."""
    if isinstance(error, CommHookError):
        let_rank_0_speak()
        error.args = (error.text,)
    _excepthook(kind, error, traceback)


class ConfigError(CommHookError):
    """A configuration that cannot mean anything, or names what does not exist."""


class CompatibilityError(CommHookError):
    """A valid configuration that cannot act in this setup (no DDP, FSDP, a second hook, ...)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a typo, otherwise an empty string."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""

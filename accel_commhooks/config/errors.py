"""Errors and warnings meant for users: the rule, the value received, the remedy. The full text appears on rank 0 only."""

from __future__ import annotations

import difflib
import logging
import multiprocessing
import os
import reprlib
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn

logger = logging.getLogger("accel_commhooks")

GRACE_SECONDS = 10.0
"""How long the other ranks wait for rank 0 to report an error before they report it themselves."""

_warned: set[str] = set()


def launched_rank() -> int:
    """The rank that the launcher gave this process; 0 outside a launcher."""
    return int(os.environ.get("RANK") or 0)


def warn_once(text: str) -> None:
    """Log a warning on rank 0, once in a process."""
    if launched_rank() == 0 and text not in _warned:
        _warned.add(text)
        logger.warning(text)


def let_rank_0_speak() -> None:
    """On every rank but 0, wait before reporting an error.

    A launcher kills all ranks as soon as the first one fails, so a slower rank 0 would be killed before it has printed
    its message. When rank 0 does fail, the launcher ends this process too. Returning from here therefore means that
    rank 0 reported nothing, and this rank must. The first rank of a node waits less than its neighbours, so at most one
    message is printed per node.
    """
    if launched_rank() != 0:
        time.sleep(GRACE_SECONDS if int(os.environ.get("LOCAL_RANK") or 0) == 0 else 2 * GRACE_SECONDS)


class CommHookError(ValueError):
    """Something the user asked for cannot be done.

    Every rank raises it, otherwise the others would hang. Only rank 0 carries the full text, so a typo on 64 ranks
    prints one message and not 64. A function spawned by a parent process (``notebook_launcher``) carries it on every
    rank, because the parent shows only the first failure.
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
    """The excepthook of the other ranks: wait for rank 0, then show the full text."""
    if isinstance(error, CommHookError):
        let_rank_0_speak()
        error.args = (error.text,)
    _excepthook(kind, error, traceback)


class ConfigError(CommHookError):
    """A configuration that is invalid, or names something that does not exist."""


class CompatibilityError(CommHookError):
    """A valid configuration that cannot work in this setup (no DDP, FSDP, a second hook, ...)."""


class DisagreementError(CommHookError):
    """Ranks that must hold the same values do not, while training runs."""


class CheckpointError(CommHookError):
    """A hook's state could not be saved."""


class LostRankError(RuntimeError):
    """A collective failed, or ranks did not meet: some rank was killed, stopped or cut off.

    Every rank that notices shows this itself.
    """


def stop(error: CommHookError) -> NoReturn:
    """Print one message, from rank 0, and exit with code 2 everywhere: a user's mistake needs no traceback."""
    let_rank_0_speak()
    print(f"accel-commhooks: {error.text}", file=sys.stderr)
    raise SystemExit(2)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a typo, otherwise an empty string."""
    if not isinstance(word, str) or len(word) > _LONGEST:
        return ""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


_LONGEST = 120


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 12
        self.maxstring = self.maxlong = self.maxother = _LONGEST

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python refuses to print it
            return f"a whole number of {x.bit_length()} bits"


_shortened = _Shortened()


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, shortened, whatever it is and however large."""
    text = _shortened.repr(value)
    return text if len(text) <= 4 * _LONGEST else f"{text[: 4 * _LONGEST]} ..."


def described(error: BaseException) -> str:
    """``ValueError: its text`` in one line, shortened."""
    try:
        text = " ".join((error.text if isinstance(error, CommHookError) else str(error)).split())
    except Exception:  # somebody else's error, whose __str__ fails in turn
        text = ""
    return f"{type(error).__name__}: {text[:300]}".removesuffix(": ")

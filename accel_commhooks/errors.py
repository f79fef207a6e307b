"""Errors meant for users: the rule, the value received, the remedy. Full text on rank 0 only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


def launched_rank() -> int:
    """The rank that the launcher gave this process; 0 outside a launcher."""
    return int(os.environ.get("RANK") or 0)


class CommHookError(ValueError):
    """Something the user asked for cannot be done.

    Every rank raises it, or the others would hang; only rank 0 carries the whole text, so that a typo on 64 ranks
    is one screen and not 64.
    """

    def __init__(self, text: str):
        self.text = text
        super().__init__(text if launched_rank() == 0 else "stopped: rank 0 shows the reason")


class ConfigError(CommHookError):
    """A configuration that cannot mean anything, or names what does not exist."""


class CompatibilityError(CommHookError):
    """A valid configuration that cannot act in this setup (no DDP, FSDP, a second hook, ...)."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a typo, otherwise an empty string."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""

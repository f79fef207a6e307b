"""Defects to plant in a process that forks ranks: the suite must find each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_commhooks.attachment import agreement, rank_files
from accel_commhooks.attachment.consistency import Consistency
from accel_commhooks.comm import collectives, pending, pieces

from .oracle import HANG, LOST, SILENT, UNNAMED


def _no_digest() -> None:
    def read(folder: Path, save: str, rank: int) -> Any:
        for file, header in rank_files.headers(folder, [rank]):
            if isinstance(header, dict) and header["save"] == save:
                return rank_files._load(file)["state"]
        raise rank_files.Unusable("missing")

    rank_files.read = read


def _any_save() -> None:
    def read(folder: Path, save: str, rank: int) -> Any:
        for file, header in rank_files.headers(folder, [rank]):
            if isinstance(header, dict):
                return rank_files._load(file)["state"]
        raise rank_files.Unusable("missing")

    rank_files.read = read


def _no_gather() -> None:
    real = rank_files._all_well

    def all_well(comm: Any, problem: str | None, folder: Path, doing: str, file: Path) -> None:
        if doing != "write":
            real(comm, problem, folder, doing, file)

    rank_files._all_well = all_well


def _raw_errors() -> None:
    @contextlib.contextmanager
    def nothing(group: Any) -> Iterator[None]:
        yield

    for module in (pending, collectives, pieces):
        module.lost_ranks_named = nothing


def _no_checks() -> None:
    Consistency.tick = lambda self, reductions=1: None  # type: ignore[method-assign]
    Consistency.check_now = lambda self: None  # type: ignore[method-assign]


def _no_timeout() -> None:
    real = dist.new_group

    def new_group(*args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    dist.new_group = new_group


def _no_agreement() -> None:
    agreement.compare = lambda process_group, event, *args: agreement.Agreement(None, event)


SEEN_IN = {
    "no-digest": ("file", 13, SILENT),
    "any-save": ("file", 13, SILENT),
    "no-gather": ("disk", 4, LOST),
    "raw-errors": ("kill", 3, UNNAMED),
    "no-checks": ("flip", 4, SILENT),
    "no-timeout": ("stop", 40, HANG),
    "no-agreement": ("differ", 3, SILENT),
}
"""The kind of faults that shows a defect, how many of them are enough, and what it is found as."""

PLANTS: dict[str, Callable[[], None]] = {
    "no-digest": _no_digest,
    "any-save": _any_save,
    "no-gather": _no_gather,
    "raw-errors": _raw_errors,
    "no-checks": _no_checks,
    "no-timeout": _no_timeout,
    "no-agreement": _no_agreement,
}

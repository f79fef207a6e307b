"""Ranks that are killed, stopped, fail or are slow, in training and in a save; and disks that cannot be written."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_commhooks.attachment import checkpoint, rank_files

from .injector import Strike
from .oracle import (
    UNNAMED,
    Verdict,
    judge_checkpoint,
    judge_equal,
    judge_survivors,
    judge_unfailed,
)
from .server import Note, run_ranks, shared_memory
from .subjects import loading, resuming, training

Reference = dict[str, Any]


def measure(name: str, world: int, saves: bool) -> Reference:
    """An undisturbed run: its weights, and how often each rank passes each place."""
    with tempfile.TemporaryDirectory(prefix="saves_", dir=shared_memory()) as folder:
        outcomes = run_ranks(training, world, name, None, folder if saves else None)
    verdict = Verdict("none", name)
    judge_unfailed(verdict, outcomes)
    judge_equal(verdict, outcomes)
    assert not verdict.problems, (name, world, verdict.problems)
    return {
        "weights": outcomes[0].value["weights"],
        "passages": [outcome.value["passages"] for outcome in outcomes],
    }


def strike(name: str, world: int, saves: bool, strike: Strike, reference: Reference) -> list[Verdict]:
    """One fault in a run; if it saves, fresh ranks then load what is left."""
    what = f"{name}, {world} ranks: {strike.how} rank {strike.rank} at {strike.place} #{strike.passage}"
    verdict = Verdict(f"{strike.how}, {'save' if strike.place.startswith('save') else 'training'}", what)
    struck = {strike.rank}
    with tempfile.TemporaryDirectory(prefix="saves_", dir=shared_memory()) as folder:
        dying = struck if strike.how in ("kill", "stop") else set()
        outcomes = run_ranks(training, world, name, strike, folder if saves else None, struck=dying)
        if "struck" not in outcomes[strike.rank].notes:
            verdict.blame(UNNAMED, f"the fault did not happen: {[o.error or o.ended for o in outcomes]}")
        if strike.how == "slow":
            judge_unfailed(verdict, outcomes)
            judge_equal(verdict, outcomes, reference["weights"])
        else:
            written = "write_aside" in strike.place or "middle" in strike.place
            judge_survivors(verdict, outcomes, struck, must_name=strike.how != "raise" or not written)
            judge_equal(verdict, outcomes)
        if saves and all("old" in outcome.notes for outcome in outcomes):
            judge_checkpoint(verdict, outcomes, run_ranks(loading, world, name, [folder], True))
    return [verdict]


STAGES = (
    "before rank_files._write_aside",
    "in the middle of the file",
    "after rank_files._write_aside",
    "before rank_files._take_its_place",
    "between the renames",
    "after rank_files._take_its_place",
    "before .old is removed",
    "after rank_files.write",
)


def worlds(name: str, sizes: tuple[int, ...], strike: Strike) -> list[Verdict]:
    """Runs of several sizes save into one folder, one after the other; the last of them is struck in its save."""
    what = f"{name}, {' then '.join(map(str, sizes))} ranks: {strike.how} rank {strike.rank} at {strike.place}"
    verdict = Verdict(f"{strike.how}, save at another world size", what)
    with tempfile.TemporaryDirectory(prefix="saves_", dir=shared_memory()) as folder:
        for size in sizes[:-1]:
            judge_unfailed(verdict, run_ranks(resuming, size, name, None, folder))
        struck = {strike.rank}
        outcomes = run_ranks(resuming, sizes[-1], name, strike, folder, struck=struck)
        judge_survivors(verdict, outcomes, struck, must_name=True)
        judge_checkpoint(verdict, outcomes, run_ranks(loading, sizes[-1], name, [folder], True))
    return [verdict]


# Disks.

DISKS = ("full", "full on all ranks", "full and small", "read-only", "a file in place of the folder")
DISKS += ("a folder in place of .new", "a folder in place of .old")
PAGE = 4096
NEED_ROOT = ("full and small", "read-only")


def disk(name: str, world: int, how: str, rank: int, share: float, reference: Reference) -> list[Verdict]:
    """A save that cannot be written: all ranks say so, and what was saved before can be loaded."""
    verdict = Verdict(f"disk {how}", f"{name}, {world} ranks: disk {how}, rank {rank}, at {share:.2f} of the file")
    with tempfile.TemporaryDirectory(prefix="saves_", dir=shared_memory()) as parent:
        folder = Path(parent) / "saves"
        folder.mkdir()
        with _mounted(folder) if how in NEED_ROOT else contextlib.nullcontext():
            outcomes = run_ranks(_saving_badly, world, name, str(folder), how, rank, share)
            judge_survivors(verdict, outcomes, set(), must_name=False)
            for each, outcome in enumerate(outcomes):
                if outcome.ended == "finished":
                    verdict.blame(UNNAMED, f"rank {each} did not notice that the save failed")
            judge_checkpoint(verdict, outcomes, run_ranks(loading, world, name, [str(folder)], True))
    return [verdict]


def _saving_badly(rank: int, world: int, note: Note, name: str, folder: str, how: str, bad: int, share: float) -> Any:
    """As ``training``, but with a bad disk from the second save on."""
    files, target = Path(folder) / checkpoint.FOLDER, folder
    real = rank_files.write
    if how == "a file in place of the folder":
        target = str(Path(folder) / "other")
        Path(target).mkdir(exist_ok=True)
        (Path(target) / checkpoint.FOLDER).write_text("not a folder")
    real_aside = rank_files._write_aside
    saves: list[int] = []

    def write_aside(file: Path, content: Any) -> str | None:
        if len(saves) < 2 or not (how == "full on all ranks" or (how == "full" and rank == bad)):
            return real_aside(file, content)
        size = file.stat().st_size  # of the older save
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), limits[1]))
        try:
            return real_aside(file, content)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def write(folder_of_files: Path, comm: Any, content: Any) -> Path:
        saves.append(1)
        if len(saves) == 2:
            comm.gather_objects(None)
            if rank == bad:
                _spoil(files, how, rank, share)
            comm.gather_objects(None)
        return real(folder_of_files, comm, content)

    rank_files.write, rank_files._write_aside = write, write_aside
    return training(rank, world, note, name, None, folder, target)


def _spoil(files: Path, how: str, rank: int, share: float) -> None:
    own = files / f"rank_{rank:05d}.pt"
    if how == "full and small":
        pages = sum(_pages(file.stat().st_size) for file in files.iterdir()) + _pages(share * own.stat().st_size)
        _mount("remount", f"size={PAGE * pages}", files.parent)
    elif how == "read-only":
        _mount("remount", "ro", files.parent)
    elif how.startswith("a folder"):
        inside = own.with_name(own.name + how.rpartition(" ")[2])
        inside.mkdir()
        (inside / "something").touch()


def _pages(size: float) -> int:
    return -(-int(size) // PAGE)


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(*words: str | Path) -> None:
    *options, folder = map(str, words)
    subprocess.run(["mount", "-o", ",".join(options), folder], check=True)


@functools.cache
def can_mount() -> bool:
    """Whether small and read-only disks can be made here."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
        return done.returncode == 0 and subprocess.run(["umount", folder]).returncode == 0

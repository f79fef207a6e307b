"""Hooks under test, and the scripts that run in the ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import Net, make_ddp, train, weights

from accel_commhooks import attach
from accel_commhooks.attachment import checkpoint, rank_files
from accel_commhooks.attachment.handle import Attachment

from .injector import Injector, Strike
from .server import Note

STEPS = 3
"""Between two events of a script."""


@dataclass(frozen=True)
class Subject:
    hook: str
    options: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (2, 3)
    buffers: bool = False


SUBJECTS = {
    "allreduce": Subject("allreduce"),
    "int8_compress": Subject("int8_compress"),
    "powersgd": Subject("powersgd", {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}),
    "powersgd int8": Subject("powersgd", {"start_powerSGD_iter": 1, "wire_dtype": "int8"}),
    "powersgd node": Subject("powersgd", {"start_powerSGD_iter": 1, "scope": "node", "ranks_per_node": 2}, (4,)),
    "batched_powersgd": Subject("batched_powersgd", {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}),
    "local": Subject("post_localsgd", {"start_localSGD_iter": 1, "period": 2, "subgroup": "none"}),
    "local node": Subject("post_localsgd", {"start_localSGD_iter": 1, "period": 2, "subgroup": [[0, 1], [2]]}, (3,)),
    "local buffers": Subject(
        "post_localsgd",
        {"start_localSGD_iter": 1, "period": 2, "subgroup": "none", "buffers": "broadcast"},
        buffers=True,
    ),
    "local outer": Subject(
        "post_localsgd", {"start_localSGD_iter": 0, "period": 2, "subgroup": "none", "outer": {"name": "nesterov"}}
    ),
    "local overlap": Subject(
        "post_localsgd", {"start_localSGD_iter": 1, "period": 2, "subgroup": "none", "overlap_steps": 1}
    ),
    "zero": Subject("zero_overlap"),
    "zero whole": Subject("zero_overlap", {"shard_buckets": False}),
    "zero masters": Subject("zero_overlap", {"wire_dtype": "bf16"}),
    "zero int8": Subject("zero_overlap", {"wire_dtype": "int8"}),
    "zero interleaved": Subject("zero_overlap", {"step": "interleaved"}),
}


def begin(subject: Subject, width: int = 16, **other: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Attachment]:
    """(model, optimizer, hook), checked every second reduction."""
    ddp = make_ddp(Net(width, subject.buffers), broadcast_buffers=False)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    options = {"check_every": 2, **subject.options, **other}
    return ddp, optimizer, attach(ddp, subject.hook, optimizer=optimizer, **options)


def save(handle: Attachment, folder: str, note: Note, name: str) -> None:
    """As Accelerate's save_state does; what is about to be saved is told first."""
    handle.open_consensus()
    handle.prepare_save()
    note(name, rank_files.digest_of(handle.state_dict()))
    checkpoint.save(handle, folder)


def training(
    rank: int, world: int, note: Note, name: str, strike: Strike | None, folder: str | None, target: str | None = None
) -> dict[str, Any]:
    """Attach, train, save, train, save again (into ``target``), train, with a fault somewhere."""
    injector = Injector(rank, strike, note)
    injector.install()
    injector.phase = "attach"
    ddp, optimizer, handle = begin(SUBJECTS[name])
    injector.phase = "train"
    train(ddp, rank, STEPS, optimizer=optimizer)
    if folder is not None:
        injector.phase = "older save"
        save(handle, folder, note, "old")
        injector.phase = "between"
        train(ddp, rank, STEPS, optimizer=optimizer, first=STEPS)
        injector.phase = "save"
        save(handle, target or folder, note, "new")
        note("saved", True)
    injector.phase = "train"
    train(ddp, rank, STEPS, optimizer=optimizer, first=2 * STEPS)
    handle.synchronize()
    return {"weights": rank_files.digest_of(weights(ddp)), "passages": injector.struck_passages()}


def resuming(rank: int, world: int, note: Note, name: str, strike: Strike | None, folder: str) -> dict[str, Any]:
    """Load what perhaps another number of ranks has saved, train, and save into the same folder, with a fault there."""
    injector = Injector(rank, strike, note)
    injector.install()
    ddp, optimizer, handle = begin(SUBJECTS[name])
    loaded = read(handle, folder)
    if loaded is not None:
        note("old", loaded)
        checkpoint.load(handle, folder)
    train(ddp, rank, STEPS, optimizer=optimizer)
    injector.phase = "save"
    save(handle, folder, note, "new")
    note("saved", True)
    injector.phase = "end"
    handle.synchronize()
    return {"weights": rank_files.digest_of(weights(ddp))}


def read(handle: Attachment, folder: str) -> str | None:
    """The digest of what this rank finds in a folder, None for nothing."""
    files = Path(folder) / checkpoint.FOLDER
    loaded = checkpoint.read(files, handle.comm, handle.owner, handle.hook.merge_states)
    return None if loaded is None else rank_files.digest_of(loaded.state)


def loading(rank: int, world: int, note: Note, name: str, folders: list[str], then_train: bool) -> dict[str, Any]:
    """The digest of what is read from each folder, None for nothing; then a few steps with what the last one held."""
    ddp, optimizer, handle = begin(SUBJECTS[name])
    found = []
    for folder in folders:
        note("loading", folder)
        found.append(read(handle, folder))
        note(f"log of {folder}", _new_records())
    if then_train:
        checkpoint.load(handle, folders[-1])
        train(ddp, rank, STEPS, optimizer=optimizer)
        handle.synchronize()
    return {"found": found, "weights": rank_files.digest_of(weights(ddp))}


def _new_records() -> list[str]:
    """What this package has logged since the last call."""
    (keep,) = logging.getLogger("accel_commhooks").handlers
    records, keep.records = keep.records, []  # type: ignore[attr-defined]
    return records

"""Hook state on disk, beside Accelerate's or Trainer's own files: ``CHECKPOINT/comm_hook/rank_00003.pt`` and the like.

A checkpoint is one thing or nothing. Loading first gathers what all files say of themselves. Of the saves that the folder
holds, the newest one is taken that is complete, was made by the same hook for the same parameters, and that every rank
can read; then every rank takes its part. If there is none, every rank starts the hook afresh, and rank 0 logs every rank's
reason.

- same world size: every rank takes its own part back, exactly;
- another world size: every rank reads all parts, and the hook merges them.

Each file carries a checksum of the model's weights. At the first forward after a load it is compared with the weights that
the model has by then, so hook state and weights of different saves do not go together unnoticed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..comm.checksum import checksum_of_all
from ..config.errors import launched_rank
from . import rank_files
from .rank_files import Unusable

if TYPE_CHECKING:
    from ..comm.collectives import Communicator
    from .handle import Attachment

logger = logging.getLogger("accel_commhooks")
FOLDER = "comm_hook"
Merge = Callable[[Iterator[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Owner:
    """What a state belongs to."""

    name: str
    parameters: dict[torch.Tensor, str]

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for parameter, name in self.parameters.items()}

    def weights(self) -> int:
        """A checksum of the weights as they are now."""
        return int(checksum_of_all(self.parameters, next(iter(self.parameters)).device))

    def refuses(self, header: dict[str, Any]) -> str | None:
        """Why a state cannot be this owner's."""
        if header["hook"] != self.name:
            return f"it holds the state of '{header['hook']}'"
        here, there = self.shapes(), header["parameters"]
        for name in dict.fromkeys([*here, *there]):
            if here.get(name) != there.get(name):
                return (
                    f"it was made for another model: '{name}' has shape {there.get(name, 'no such parameter')} there and "
                    f"{here.get(name, 'no such parameter')} here"
                )
        return None


@dataclass(frozen=True)
class Loaded:
    """A state, and the checksum of the weights that it was saved with."""

    state: dict[str, Any]
    weights: int


def save(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> Path:
    """Write this rank's part of the hook's state into a checkpoint folder; ``index`` distinguishes several models. Collective."""
    return write(
        _folder(checkpoint, index), attachment.comm, attachment.owner, attachment.new_save(), attachment.state_dict()
    )


def load(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> bool:
    """Restore the hook from a checkpoint folder by the rules above. Collective. Returns whether a state was loaded."""
    merge = attachment.hook.merge_states
    loaded = read(_folder(checkpoint, index), attachment.comm, attachment.owner, merge)
    if loaded is not None:
        attachment.load_state_dict(loaded.state)
        attachment.expect_weights(loaded.weights)
    return loaded is not None


def write(folder: Path, comm: Communicator, owner: Owner, save_id: str, state: dict[str, Any]) -> Path:
    """Write this rank's part. Collective."""
    content = {
        "hook": owner.name,
        "save": save_id,
        "time": time.time(),
        "step": state["step"],
        "parameters": owner.shapes(),
        "weights": owner.weights(),
        "state": state,
    }
    return rank_files.write(folder, comm, content)


def read(folder: Path, comm: Communicator, owner: Owner, merge: Merge) -> Loaded | None:
    """This rank's state by the rules above, or None on every rank, with the reasons in the log. Collective."""
    # Rank 0 looks at all files: there may be more of them than there are ranks now.
    headers, problems = [], []
    for file, header in rank_files.headers(folder, None if comm.rank == 0 else [comm.rank]):
        if isinstance(header, Unusable):
            problems.append(str(header))
        elif (refusal := owner.refuses(header)) is not None:
            problems.append(f"{file.name}: {refusal}")
        else:
            headers.append(header)
    everyone = comm.gather_objects((headers, problems))
    saves = saves_of([header for found, _ in everyone for header in found])
    reasons = _reasons(folder, [found for _, found in everyone], saves)
    for save in (each for each in saves if each.is_whole):
        part, problem = _part(folder, comm, save, merge)
        failed = {rank: each for rank, each in enumerate(comm.gather_objects(problem)) if each is not None}
        if not failed and part is not None:
            _say_what_was_found(owner, folder, comm, save, reasons if save is not saves[0] else [])
            return Loaded(part, save.weights)
        reasons += [f"rank {rank}: {each}" for rank, each in failed.items()]
    _say(f"'{owner.name}' starts afresh: {folder} cannot be used ({'; '.join(dict.fromkeys(reasons))})")
    return None


@dataclass
class Save:
    """One save, as far as its files are there."""

    save: str
    time: float
    step: int
    world_size: int
    weights: int
    ranks: set[int]

    @property
    def is_whole(self) -> bool:
        return self.ranks >= set(range(self.world_size))


def saves_of(headers: list[dict[str, Any]]) -> list[Save]:
    """The saves of which there are files, the newest first. Clocks differ, so the lowest rank's counts."""
    saves: dict[str, Save] = {}
    for header in sorted(headers, key=lambda each: each["rank"]):
        kept = {key: header[key] for key in ("save", "time", "step", "world_size", "weights")}
        saves.setdefault(header["save"], Save(**kept, ranks=set())).ranks.add(header["rank"])
    return sorted(saves.values(), key=lambda each: (each.time, each.save), reverse=True)


def _part(folder: Path, comm: Communicator, save: Save, merge: Merge) -> tuple[dict[str, Any] | None, str | None]:
    """(this rank's state, None) or (None, why not)"""
    try:
        if save.world_size == comm.size:
            return rank_files.read(folder, save.save, comm.rank), None
        # One in memory at a time.
        return merge(rank_files.read(folder, save.save, rank) for rank in range(save.world_size)), None
    except Unusable as error:
        return None, str(error)


def _reasons(folder: Path, problems: list[list[str]], saves: list[Save]) -> list[str]:
    """What is wrong with the files, by rank, without repetition: rank 0 has seen those of the others too."""
    texts = [(f"rank {rank}: " if rank else "") + text for rank, found in enumerate(problems) for text in found]
    for save in saves:
        if not save.is_whole:
            missing = sorted(set(range(save.world_size)) - save.ranks)
            texts.append(
                f"the save of step {save.step} by {save.world_size} ranks is torn: there is no file of "
                f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}"
            )
    if not texts and not saves:
        texts.append("the checkpoint was made without a hook" if folder.parent.is_dir() else "it does not exist")
    return list(dict.fromkeys(texts))


def _say_what_was_found(owner: Owner, folder: Path, comm: Communicator, save: Save, torn: list[str]) -> None:
    if torn:
        _say(
            f"'{owner.name}' goes on from the save of step {save.step}, the newest complete one in {folder}: {'; '.join(torn)}"
        )
    if save.world_size != comm.size:
        _say(
            f"'{owner.name}' was saved by {save.world_size} ranks and is restored on {comm.size}: what the ranks kept apart is "
            "merged, so that its mean over ranks is unchanged",
            logging.INFO,
        )


def _folder(checkpoint: str | os.PathLike, index: int) -> Path:
    return Path(checkpoint) / (FOLDER if index == 0 else f"{FOLDER}_{index}")


def _say(text: str, level: int = logging.WARNING) -> None:
    if launched_rank() == 0:
        logger.log(level, text)

"""Hook state on disk: one file per rank, beside Accelerate's or Trainer's own files.

``CHECKPOINT/comm_hook/rank_00003.pt`` holds rank 3's state; it loads with ``weights_only=True``. It is
written to a temporary file and renamed, so it is either complete or absent. The rules on loading:

- same hook, same world size: every rank takes its own file back, exactly;
- same hook, different world size: every rank reads all files, and the hook merges them;
- no files, another hook, or files that some rank cannot read: every rank starts the hook afresh, and rank 0 logs the reason.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.errors import launched_rank

if TYPE_CHECKING:
    from ..comm.collectives import Communicator
    from .handle import Attachment

logger = logging.getLogger("accel_commhooks")
FORMAT = 1
FOLDER = "comm_hook"


def save(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> Path:
    """Write this rank's hook state into a checkpoint folder; ``index`` distinguishes several models."""
    return write(_folder(checkpoint, index), attachment.comm, attachment.config.name, attachment.state_dict())


def load(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> bool:
    """Restore the hook from a checkpoint folder by the rules above. Collective. Returns whether a state was loaded."""
    hook = attachment.hook
    state = read(_folder(checkpoint, index), attachment.comm, attachment.config.name, hook.merge_states)
    if state is not None:
        attachment.load_state_dict(state)
    return state is not None


def write(folder: Path, comm: Communicator, name: str, state: dict[str, Any]) -> Path:
    """Write this rank's file: to a temporary file, then renamed."""
    file = folder / f"rank_{comm.rank:05d}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "hook": name, "world_size": comm.size, "rank": comm.rank, "state": state}
    aside = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return file


def read(
    folder: Path, comm: Communicator, name: str, merge: Callable[[Iterator[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any] | None:
    """This rank's state by the rules above, or None on every rank, with the reason in the log."""
    state: dict[str, Any] | None = None
    saved_by = comm.size
    problem = "another rank could not read its part"
    try:
        own = folder / f"rank_{comm.rank:05d}.pt"
        first = _read(own if own.exists() else _any_file(folder))
        saved_by = first["world_size"]
        if first["hook"] != name:
            problem = f"it holds the state of '{first['hook']}'"
        elif saved_by == comm.size:
            state = _read(own)["state"]
        else:
            state = merge(_all_states(folder, saved_by))
    except _Unusable as error:
        problem = str(error)
    if not comm.all_ranks_true(state is not None):
        _say(f"'{name}' starts afresh: {folder} cannot be used ({problem})")
        return None
    if saved_by != comm.size:
        _say(
            f"'{name}' was saved by {saved_by} ranks and is restored on {comm.size}: what the ranks kept apart is merged, "
            "so that its mean over ranks is unchanged",
            logging.INFO,
        )
    return state


class _Unusable(Exception):
    pass


def _folder(checkpoint: str | os.PathLike, index: int) -> Path:
    return Path(checkpoint) / (FOLDER if index == 0 else f"{FOLDER}_{index}")


def _any_file(folder: Path) -> Path:
    files = sorted(folder.glob("rank_*.pt"))
    if not files:
        raise _Unusable("the checkpoint was made without a hook" if folder.parent.is_dir() else "it does not exist")
    return files[0]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise _Unusable(f"{file.name} is missing") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        raise _Unusable(f"{file.name} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _Unusable(f"{file.name} has a format that this version does not know")
    return content


def _all_states(folder: Path, world_size: int) -> Iterator[dict[str, Any]]:
    """The states of all ranks of the run that wrote them, one in memory at a time."""
    for rank in range(world_size):
        yield _read(folder / f"rank_{rank:05d}.pt")["state"]


def _say(text: str, level: int = logging.WARNING) -> None:
    if launched_rank() == 0:
        logger.log(level, text)

"""Hook state on disk: one file a rank beside Accelerate's or Trainer's own files.

``CHECKPOINT/comm_hook/rank_00003.pt`` holds rank 3's state; it loads with ``weights_only=True`` and is written aside and
renamed, so it is whole or absent. The rules on loading:

- same hook, same world size: every rank takes its own file back, exactly;
- same hook, other world size: every rank reads all files, and the hook merges them;
- no files, another hook, or files that some rank cannot read: every rank starts the hook anew, and rank 0 says why.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import launched_rank

if TYPE_CHECKING:
    from .attachment import Attachment

logger = logging.getLogger("accel_commhooks")
FORMAT = 1
FOLDER = "comm_hook"


def save(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> Path:
    """Write this rank's hook state into a checkpoint folder; ``index`` tells several models apart."""
    comm = attachment.comm
    file = _folder(checkpoint, index) / f"rank_{comm.rank:05d}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "hook": attachment.config.name,
        "world_size": comm.size,
        "rank": comm.rank,
        "state": attachment.state_dict(),
    }
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


def load(attachment: Attachment, checkpoint: str | os.PathLike, *, index: int = 0) -> bool:
    """Restore the hook from a checkpoint folder by the rules above. Collective. True if a state was taken over."""
    folder = _folder(checkpoint, index)
    name, comm = attachment.config.name, attachment.comm
    state: dict[str, Any] | None = None
    resized = False
    problem = ""
    try:
        own = folder / f"rank_{comm.rank:05d}.pt"
        first = _read(own if own.exists() else _any_file(folder))
        if first["hook"] != name:
            problem = f"it holds the state of hook '{first['hook']}'"
        elif first["world_size"] == comm.size:
            state = _read(own)["state"]
        else:
            resized = True
            state = attachment.hook.merge_states(_all_states(folder, first["world_size"]))
    except _Unusable as error:
        problem = str(error)
    if not comm.agree(state is not None):
        _say(
            f"hook '{name}' starts anew: {folder} cannot be used"
            + (f" ({problem})" if problem else " (another rank could not read its part)")
        )
        return False
    assert state is not None
    attachment.load_state_dict(state)
    if resized:
        _say(
            f"hook '{name}' was restored from a run of {first['world_size']} ranks on {comm.size} ranks: what the ranks "
            "kept apart was merged so that its mean over ranks is unchanged",
            logging.INFO,
        )
    return True


def exists(checkpoint: str | os.PathLike, *, index: int = 0) -> bool:
    """Whether the folder holds hook state at all."""
    return any(_folder(checkpoint, index).glob("rank_*.pt"))


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

"""Which checkpoint to go on from after a kill.

A kill may come while a checkpoint is being written. Trainer's own search takes the newest folder, whether it is whole or not, and
then fails at every restart, or goes on with what is there. A file that was cut off is recognised by its end.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

TRAINER_STATE = "trainer_state.json"
"""Written by Trainer after its other files, and before the hook's."""
TOGETHER = ("optimizer.pt", "scheduler.pt")
"""Both are there, or neither (save_only_model)."""


def last_whole_checkpoint(output_dir: str | os.PathLike, *, hook: bool = True) -> str | None:
    """The newest ``checkpoint-N`` that was written to its end; None without one.

    ``trainer.train(resume_from_checkpoint=last_whole_checkpoint(args.output_dir))``. ``hook=False`` is for a run without a hook;
    otherwise a checkpoint without the files of all ranks' hooks is not whole. The folder must be one that all nodes share.
    """
    for folder in sorted(_checkpoints(Path(output_dir)), key=_step, reverse=True):
        if _is_whole(folder, hook):
            return str(folder)
    return None


def _checkpoints(output_dir: Path) -> Iterator[Path]:
    for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name):
            yield folder


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _is_whole(folder: Path, hook: bool) -> bool:
    if not (folder / TRAINER_STATE).is_file() or len({(folder / name).is_file() for name in TOGETHER}) > 1:
        return False
    if not all(_is_readable(file) for file in folder.rglob("*") if file.is_file()):
        return False
    ranks = {file.parent: _ranks_that_wrote(file) for file in folder.glob("*/rank_*.pt")}
    if (hook and not ranks) or not all(ranks.values()):
        return False
    expected = [part / f"rank_{rank:05d}.pt" for part, count in ranks.items() for rank in range(count)]
    if any(folder.glob("rng_state_*.pth")):
        expected += [folder / f"rng_state_{rank}.pth" for rank in range(max(ranks.values(), default=1))]
    return all(file.is_file() for file in expected)


def _is_readable(file: Path) -> bool:
    """Whether a file has its end: archives have their table of contents there, and safetensors say how long they are."""
    if file.suffix in (".pt", ".pth"):
        return zipfile.is_zipfile(file)
    if file.suffix == ".safetensors":
        return _has_all_tensors(file)
    if file.suffix == ".json":
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return False
    return True


def _has_all_tensors(file: Path) -> bool:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            return False
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)


def _ranks_that_wrote(file: Path) -> int:
    """How many ranks wrote the state of which this is a part; 0 where that cannot be read."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return int(content["world_size"])
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, TypeError):
        return 0

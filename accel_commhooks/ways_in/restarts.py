"""Which checkpoint to go on from after a kill.

A kill may come while a checkpoint is being written. Trainer's own search takes the newest folder, whether it is whole or not, and
then fails at every restart, or goes on with what is there. A file that was cut off is recognised by its end.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..attachment import checkpoint, rank_files

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
    parts = {file.parent for file in folder.glob("*/rank_*.pt*")}
    ranks = [_ranks_that_wrote(part) for part in parts]
    if (hook and not ranks) or not all(ranks):
        return False
    random_states = range(max(ranks, default=1)) if any(folder.glob("rng_state_*.pth")) else ()
    return all((folder / f"rng_state_{rank}.pth").is_file() for rank in random_states)


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


def _ranks_that_wrote(part: Path) -> int:
    """How many ranks wrote the newest save in a folder; 0 if some of its files are missing or cannot be read."""
    headers = [header for _, header in rank_files.headers(part, None)]
    saves = checkpoint.saves_of([header for header in headers if not isinstance(header, rank_files.Unusable)])
    if not saves or not saves[0].is_whole or any(isinstance(header, rank_files.Unusable) for header in headers):
        return 0
    return saves[0].world_size

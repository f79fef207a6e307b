"""The files of one save: one per rank, written together, read together, each of them complete or not used.

``rank_00003.pt`` is rank 3's. A save first writes ``rank_00003.pt.new``; when every rank has done so, the file before becomes
``.old`` and the new one takes its place; when every rank has done that, ``.old`` is removed. Wherever a rank is killed, either
the files of the new save or those of the one before are complete, on all ranks, and reading finds them by what they say of
themselves: a save id, the number of ranks, the rank, and a digest of the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..comm.checksum import checksum
from ..comm.collectives import Communicator
from ..comm.roll_call import named
from ..config.errors import CheckpointError

FORMAT = 2
SUFFIXES = ("", ".new", ".old")
HEADER = ("hook", "world_size", "rank", "save", "time", "step", "parameters", "weights", "digest")

Content = dict[str, Any]


class Unusable(Exception):
    """Why a file cannot be used."""


# Writing.


def write(folder: Path, comm: Communicator, content: Content) -> Path:
    """Write this rank's file of a save. Collective: it succeeds on every rank, or raises the reasons on every rank."""
    file = _file(folder, comm.rank)
    content = {"format": FORMAT, **content, "world_size": comm.size, "rank": comm.rank}
    problem = _write_aside(file, {**content, "digest": digest_of(content["state"])})
    _all_well(comm, problem, folder, "write", file)
    problem = _take_its_place(file)
    _all_well(comm, problem, folder, "rename", file)
    _remove(_beside(file, ".old"))
    return file


def _write_aside(file: Path, content: Content) -> str | None:
    new = _beside(file, ".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except Exception as error:  # torch.save raises RuntimeError for a full disk, and pickle anything
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _take_its_place(file: Path) -> str | None:
    try:
        if file.exists():
            file.replace(_beside(file, ".old"))
        _beside(file, ".new").replace(file)
        _sync_folder(file.parent)
    except OSError as error:
        return str(error)
    return None


def _all_well(comm: Communicator, problem: str | None, folder: Path, doing: str, file: Path) -> None:
    problems = comm.gather_objects(problem)
    failed = [rank for rank, each in enumerate(problems) if each is not None]
    if failed:
        if doing == "write":
            _remove(_beside(file, ".new"))
        raise CheckpointError(
            f"the hook's state was not saved in {folder}: {named(failed)} could not {doing} a file ({problems[failed[0]]}); "
            "what was saved there before is still there"
        )


def _remove(file: Path) -> None:
    """If it can be removed; one that stays does no harm, and what kept it from being written may keep it in place."""
    with contextlib.suppress(OSError):
        file.unlink()


def _sync_folder(folder: Path) -> None:
    """So that new names survive a power failure; not every file system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Reading.


def headers(folder: Path, ranks: list[int] | None) -> Iterator[tuple[Path, Content | Unusable]]:
    """What the files of these ranks, or of all, say of themselves; tensors are not read."""
    found = (
        sorted(folder.glob("rank_*.pt*")) if ranks is None else [f for rank in ranks for f in _versions(folder, rank)]
    )
    for file in found:
        if file.name.endswith(tuple(f".pt{suffix}" for suffix in SUFFIXES)) and file.exists():
            try:
                content = _load(file, mmap=True)
                yield file, {key: content[key] for key in HEADER}
            except Unusable as error:
                yield file, error


def read(folder: Path, save: str, rank: int) -> Any:
    """The state of a rank in a save, if it is what was written."""
    for file, header in headers(folder, [rank]):
        if isinstance(header, dict) and header["save"] == save:
            content = _load(file)
            if digest_of(content["state"]) != content["digest"]:
                raise Unusable(f"{file.name} is damaged: its content does not have the digest that was written")
            return content["state"]
    raise Unusable(f"{_file(folder, rank).name} is missing, or is of another save")


def _load(file: Path, **how: Any) -> Content:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, **how)
    except FileNotFoundError:
        raise Unusable(f"{file.name} is missing") from None
    except Exception as error:  # whatever the bytes of a damaged file lead torch.load to
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise Unusable(f"{file.name} is damaged: {reason}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Unusable(f"{file.name} has a format that this version does not know")
    if missing := [key for key in (*HEADER, "state") if key not in content]:
        raise Unusable(f"{file.name} is damaged: it lacks {', '.join(missing)}")
    if file.name.split(".")[0] != _file(file.parent, content["rank"]).stem:
        raise Unusable(f"{file.name} holds the state of rank {content['rank']}")
    return content


def digest_of(state: Any) -> str:
    """A text that is equal for equal states: plain values, and tensors by type, shape and checksum."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)} {int(checksum(value))};".encode())
        elif isinstance(value, dict):
            digest.update(f"dict {len(value)};".encode())
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            digest.update(f"list {len(value)};".encode())
            for item in value:
                add(item)
        else:
            digest.update(f"{type(value).__name__} {value!r};".encode())

    add(state)
    return digest.hexdigest()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.pt"


def _versions(folder: Path, rank: int) -> list[Path]:
    return [_beside(_file(folder, rank), suffix) for suffix in SUFFIXES]


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)

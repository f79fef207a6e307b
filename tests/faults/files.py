"""Files that are damaged, missing or of something else before a load. Many folders are read by one set of ranks."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import train

from accel_commhooks.attachment import checkpoint

from .oracle import LOST, SILENT, UNNAMED, Verdict, judge_equal, judge_unfailed
from .server import Note, Outcome, run_ranks, shared_memory
from .subjects import STEPS, SUBJECTS, begin, loading, save

BASES = ("first", "second", "other run", "other world", "other model", "other hook")


@dataclass
class Damage:
    """What was done to a folder, and which saves are whole in it afterwards."""

    folder: Path
    what: str
    whole: list[str]
    certain: bool = True
    """False where the change may be without a consequence, as a bit in the padding of a file is."""
    ranks: tuple[int, ...] = ()


def making(rank: int, world: int, note: Note, name: str, out: str, base: str) -> None:
    """Make whole saves to damage: two of one run, or one that differs in something."""
    subject = SUBJECTS["allreduce" if name != "allreduce" else "powersgd"] if base == "other hook" else SUBJECTS[name]
    ddp, optimizer, handle = begin(subject, width=20 if base == "other model" else 16)
    train(ddp, rank, STEPS + (base != "first"), optimizer=optimizer)
    save(handle, f"{out}/{base}", note, base)
    if base == "first":
        train(ddp, rank, STEPS, optimizer=optimizer, first=STEPS)
        save(handle, f"{out}/second", note, "second")


def damaged(name: str, world: int, kinds: list[tuple[str, int]]) -> list[Verdict]:
    """Each kind of damage, with a seed, in a folder of its own; whole folders are read first, to compare with."""
    with tempfile.TemporaryDirectory(prefix="files_", dir=shared_memory()) as parent:
        out = Path(parent)
        for base in BASES:
            if base != "second":
                made = run_ranks(making, 4 - world + 1 if base == "other world" else world, name, parent, base)
                assert all(outcome.ended == "finished" for outcome in made), made
        damages = []
        for number, (kind, seed) in enumerate(kinds):
            folder = out / f"damaged {number}"
            damages.append(DAMAGES[kind](_Workshop(out, folder, world, random.Random(seed))))
            damages[-1].what = f"{kind}: {damages[-1].what}"
        folders = [str(out / base) for base in BASES] + [str(damage.folder) for damage in damages]
        loads = run_ranks(loading, world, name, folders, False, limit=60)
    return [_judge(kind, damage, name, world, loads, folders) for (kind, _), damage in zip(kinds, damages, strict=True)]


def _judge(kind: str, damage: Damage, name: str, world: int, loads: list[Outcome], folders: list[str]) -> Verdict:
    verdict = Verdict(f"file {kind}", f"{name}, {world} ranks: {damage.what}")
    judge_unfailed(verdict, loads)
    if verdict.problems:
        last = loads[0].notes.get("loading")
        verdict.problems = verdict.problems if last == str(damage.folder) else []
        if last is not None and folders.index(last) < folders.index(str(damage.folder)):
            verdict.blame(UNNAMED, f"not tried: the ranks failed at {last}")
        return verdict
    judge_equal(verdict, loads)
    found = [load.value["found"][folders.index(str(damage.folder))] for load in loads]
    pristine = {base: [load.value["found"][number] for load in loads] for number, base in enumerate(BASES)}
    assert all(None not in pristine[base] for base in ("first", "second", "other run", "other world")), loads
    log = " ".join(loads[0].notes[f"log of {damage.folder}"])
    if None in found:
        if any(found):
            verdict.blame(SILENT, f"some ranks loaded a save and others did not: {found}")
        if damage.whole and damage.certain:
            verdict.blame(LOST, f"{damage.whole} is whole, but ranks started afresh: {log}")
        named = [f"rank_{rank:05d}.pt" for rank in damage.ranks] + [f"rank {rank}" for rank in damage.ranks]
        if not log or (damage.ranks and not any(text in log for text in named) and "ranks" not in log):
            verdict.blame(UNNAMED, f"the log does not say why: {log!r}")
    elif found not in [pristine[base] for base in damage.whole]:
        loaded = [base for base, digests in pristine.items() if digests == found]
        verdict.blame(SILENT, f"ranks loaded {loaded or 'something that was never saved'}, whole is {damage.whole}")
    return verdict


class _Workshop:
    """A folder to be damaged, and what to damage it with."""

    def __init__(self, bases: Path, folder: Path, world: int, chance: random.Random):
        self.bases, self.folder, self.world, self.chance = bases, folder, world, chance
        self.both = chance.random() < 0.5
        """Whether two saves are there, as while the newer one takes the place of the older one."""
        everyone = tuple(range(world))
        self.ranks = everyone if chance.random() < 0.25 else (chance.randrange(world),)
        files = folder / checkpoint.FOLDER
        files.mkdir(parents=True)
        for rank in everyone:
            first, second = (self.base(name, rank) for name in ("first", "second"))
            shutil.copy(first, files / (first.name + (".old" if self.both else "")))
            if self.both:
                shutil.copy(second, files / (second.name + chance.choice(["", ".new"])))

    def base(self, name: str, rank: int) -> Path:
        return self.bases / name / checkpoint.FOLDER / f"rank_{rank:05d}.pt"

    def newest(self, rank: int) -> Path:
        """The file of the save that is to be damaged."""
        name = self.folder / checkpoint.FOLDER / f"rank_{rank:05d}.pt"
        new = name.with_name(name.name + ".new")
        return new if new.exists() else name

    def done(self, what: str, *, certain: bool = True) -> Damage:
        """The newest save is damaged on ``ranks``; an older one is whole, if there was one."""
        whole = ["first"] if self.both else []
        if not certain:
            whole.append("second" if self.both else "first")
        text = f"{what}, ranks {list(self.ranks)}, {'two saves' if self.both else 'one save'} in the folder"
        return Damage(self.folder, text, whole, certain, self.ranks)


def _bytes_changed(change: Callable[[bytearray, random.Random], object], *, certain: bool = True) -> Any:
    def damage(shop: _Workshop) -> Damage:
        for rank in shop.ranks:
            content = bytearray(shop.newest(rank).read_bytes())
            change(content, shop.chance)
            shop.newest(rank).write_bytes(content)
        return shop.done("bytes changed", certain=certain)

    return damage


def _truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(1, len(content) - 30) :]


def _garble(content: bytearray, chance: random.Random) -> None:
    content[:] = chance.randbytes(len(content))


def _flip(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _alter(shop: _Workshop) -> Damage:
    """A bit of the state that was wrong when it was written: the file is well formed, and only the digest tells."""
    for rank in shop.ranks:
        content = torch.load(shop.newest(rank), weights_only=True)
        tensors: list[torch.Tensor] = []

        def collect(value: Any, tensors: list[torch.Tensor] = tensors) -> None:
            if isinstance(value, torch.Tensor) and value.numel():
                tensors.append(value)
            for item in value.values() if isinstance(value, dict) else ():
                collect(item)

        collect(content["state"])
        if tensors:
            raw = shop.chance.choice(tensors).view(-1).view(torch.uint8)
            raw[shop.chance.randrange(raw.numel())] ^= 1 << shop.chance.randrange(8)
        else:
            content["state"]["step"] ^= 1
        torch.save(content, shop.newest(rank))
    return shop.done("a bit of the state")


def _swap(shop: _Workshop) -> Damage:
    shop.ranks = tuple(shop.chance.sample(range(shop.world), 2))
    one, other = (shop.newest(rank) for rank in shop.ranks)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    return shop.done("swapped")


def _delete(shop: _Workshop) -> Damage:
    for rank in shop.ranks:
        shop.newest(rank).unlink()
    done = shop.done("deleted")
    done.ranks = done.ranks if len(done.ranks) < shop.world else ()
    return done


def _of(base: str) -> Any:
    """The files of some ranks, or of all, are those of something else."""

    def damage(shop: _Workshop) -> Damage:
        found = "first" if base == "second" and shop.both else base
        for rank in shop.ranks:
            source = shop.base(found, rank)
            shutil.copy(source if source.exists() else shop.base(found, 0), shop.newest(rank))
        done = shop.done(f"files of {found}")
        whole = len(list((shop.bases / found / checkpoint.FOLDER).iterdir())) <= len(shop.ranks) == shop.world
        if whole and base in ("second", "other run", "other world") and found not in done.whole:
            done.whole.append(found)
        return done

    return damage


def _another_world(shop: _Workshop) -> Damage:
    """The folder holds a whole save of another number of ranks, among older files."""
    files = shop.folder / checkpoint.FOLDER
    for file in (shop.bases / "other world" / checkpoint.FOLDER).iterdir():
        for suffix in ("", ".new", ".old"):
            (files / (file.name + suffix)).unlink(missing_ok=True)
        shutil.copy(file, files / file.name)
    left = [rank for rank in range(shop.world) if not shop.base("other world", rank).exists()]
    return Damage(shop.folder, "a save of another world size, and older files", ["other world"], ranks=tuple(left))


DAMAGES: dict[str, Callable[[_Workshop], Damage]] = {
    "truncated": _bytes_changed(_truncate),
    "of zero length": _bytes_changed(lambda content, chance: content.clear()),
    "garbage": _bytes_changed(_garble),
    "with a flipped bit": _bytes_changed(_flip, certain=False),
    "with a flipped bit in the state": _alter,
    "swapped between ranks": _swap,
    "deleted": _delete,
    "of another save": _of("second"),
    "of another run": _of("other run"),
    "of another model": _of("other model"),
    "of another hook": _of("other hook"),
    "of one rank of another world": _of("other world"),
    "of another world size": _another_world,
}

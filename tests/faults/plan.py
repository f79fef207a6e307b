"""Which faults a seed gives. What is struck is drawn first; where, when an undisturbed run has told which places there are."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from .differences import DIFFERENCES, differ, flip
from .files import DAMAGES, damaged
from .injector import Strike
from .oracle import Verdict
from .plants import PLANTS, SEEN_IN
from .strikes import DISKS, NEED_ROOT, STAGES, can_mount, disk, strike, worlds
from .subjects import SUBJECTS

SHARES = {
    "kill": 0.21,
    "stop": 0.12,
    "raise": 0.11,
    "slow": 0.09,
    "disk": 0.06,
    "file": 0.26,
    "worlds": 0.04,
    "differ": 0.05,
    "flip": 0.06,
}
BATCH = 13
"""Damaged folders that one set of ranks reads."""

Run = tuple[str, int, bool]
"""(subject, ranks, whether it saves) of an undisturbed run."""


@dataclass
class Job:
    """One or more faults that are tried together, in a process of their own."""

    family: str
    faults: int
    arguments: tuple
    needs: Run | None = None
    plant: str | None = None

    def run(self, references: dict[Run, Any]) -> list[Verdict]:
        """In a process of its own, which a defect may be planted in."""
        if self.plant is not None:
            PLANTS[self.plant]()
        if self.family in ("kill", "stop", "raise", "slow"):
            assert self.needs is not None
            return strike(*self.needs, self._strike(references[self.needs]), references[self.needs])
        if self.family == "disk":
            return disk(*self.arguments, {})
        return {"file": damaged, "worlds": worlds, "differ": differ, "flip": flip}[self.family](*self.arguments)

    def _strike(self, reference: dict[str, Any]) -> Strike:
        """Every place of the chosen part of the script is as likely as every other, however often it is passed."""
        rank, saving, seed = self.arguments
        chance, passages = random.Random(seed), reference["passages"][rank]
        if self.family == "raise":  # user code runs in training, and where its state is pickled
            passages = {place: n for place, n in passages.items() if place not in NO_USER_CODE}
        phase = "save" if saving else chance.choice(["attach", "train", "train", "train"])
        place = chance.choice(sorted(place for place in passages if place.startswith(phase)))
        seconds = chance.uniform(0.3, 1.5) if self.family == "slow" else 0.0
        return Strike(self.family, rank, place, chance.randrange(passages[place]), seconds)


NO_USER_CODE = ("save: between the renames", "save: before .old is removed")


def plan(count: int, seed: int, only: list[str] | None = None) -> list[Job]:
    """``count`` faults, or a few more, in an order in which kinds alternate."""
    chance, jobs = random.Random(seed), []
    shares = {family: share for family, share in SHARES.items() if only is None or family in only}
    for family, share in shares.items():
        left = max(1, round(count * share / sum(shares.values())))
        while left > 0:
            jobs.append(_job(family, left, len(jobs), random.Random(chance.random())))
            left -= jobs[-1].faults
    while sum(job.faults for job in jobs) < count:
        family = chance.choice([each for each in shares if each != "file"] or ["file"])
        jobs.append(_job(family, 1, len(jobs), random.Random(chance.random())))
    chance.shuffle(jobs)
    return jobs


def planted(name: str | None, jobs: list[Job], seed: int) -> list[Job]:
    """The jobs with a defect; for ``all``, those in which each of the defects must be seen."""
    if name == "all":
        return [job for each in PLANTS for job in planted(each, plan(SEEN_IN[each][1], seed, [SEEN_IN[each][0]]), seed)]
    return [dataclasses.replace(job, plant=name) for job in jobs]


def _job(family: str, left: int, number: int, chance: random.Random) -> Job:
    name = chance.choice(list(SUBJECTS))
    world = chance.choice(SUBJECTS[name].worlds)
    rank, seed = chance.randrange(world), chance.randrange(2**31)
    if family in ("kill", "stop", "raise", "slow"):
        saving = chance.random() < 0.4
        return Job(family, 1, (rank, saving, seed), (name, world, saving))
    if family == "file":
        name, world = chance.choice([each for each in SUBJECTS if 2 in SUBJECTS[each].worlds]), chance.choice([2, 3])
        every = list(DAMAGES)
        kinds = [(every[(number + i) % len(every)], chance.randrange(2**31)) for i in range(min(left, BATCH))]
        return Job(family, len(kinds), (name, world, kinds))
    if family == "disk":
        possible = [how for how in DISKS if how not in NEED_ROOT or can_mount()]
        return Job(family, 1, (name, world, possible[number % len(possible)], rank, chance.uniform(0.02, 0.9)))
    if family == "worlds":
        name = chance.choice([each for each in SUBJECTS if 2 in SUBJECTS[each].worlds])
        sizes = chance.choice([(4, 2), (2, 4), (4, 2, 4), (3, 2), (2, 3, 2)])
        how = chance.choice(["kill", "kill", "stop"])
        return Job(
            family, 1, (name, sizes, Strike(how, chance.randrange(sizes[-1]), f"save: {chance.choice(STAGES)}", 0))
        )
    if family == "differ":
        return Job(family, 1, (name, world, rank, DIFFERENCES[number % len(DIFFERENCES)]))
    return Job(family, 1, (name, world, rank, seed, chance.random() < 0.4))

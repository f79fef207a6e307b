"""One rank's part of a soak at one world size."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import distance

from .gauges import Sample, count_tensors, growth, growth_attached, take_sample
from .plants import PLANTS
from .trainee import Step, Trainee

REPEAT_TOLERANCE = 1e-6
"""Between steps and their repetition from a checkpoint: the same operations in the same order, so only an averaging that
starts from other roundings (zero_overlap's masters, a mean of equal replicas) may show, in weights of order one."""
STAYING = ("repeat", "check", "evaluate", "check", "save", "check")
LEAVING = ("detach", "repeat", "check", "evaluate", "wrap", "check")
"""Events. The hook stays attached through those of the first kind, long enough that what it does not give up shows."""
GIVE_UP = 5
"""Problems of a rank after which a hook's turn ends."""
WARM_UP = 0.1
"""The part of the steps before samples count: every hook is used once, so that whatever is made once has been made."""


@dataclass(frozen=True)
class Settings:
    variants: dict[str, tuple[str, dict[str, Any]]]
    steps: int
    seed: int = 0
    rounds: int = 2
    """How often each hook has its turn, after the warm-up."""
    plant: str | None = None
    loud: bool = False


@dataclass
class Report:
    counts: dict[str, Counter] = field(default_factory=dict)
    """By hook."""
    samples: list[Sample] = field(default_factory=list)
    """After each turn of a hook, when everything was taken down; without the warm-up."""
    problems: list[str] = field(default_factory=list)


def soak(rank: int, world_size: int, settings: Settings) -> Report:
    """What a rank does; the report is of this rank."""
    try:
        with PLANTS[settings.plant][0]() if settings.plant else contextlib.nullcontext():
            return Soak(rank, world_size, settings).run()
    finally:
        gc.unfreeze()


class Soak:
    def __init__(self, rank: int, world_size: int, settings: Settings):
        self.rank, self.world_size, self.settings = rank, world_size, settings
        self.report = Report({title: Counter() for title in settings.variants})

    def run(self) -> Report:
        settings, turns = self.settings, len(self.settings.variants)
        long = max(4, round(settings.steps * (1 - WARM_UP) / turns / settings.rounds))
        for turn in range(settings.rounds + 1):
            for title in settings.variants:
                steps = long if turn else max(4, round(settings.steps * WARM_UP / turns))
                self._visit(title, turn, steps)
                if turn:
                    self.report.samples.append(take_sample())
                else:
                    # What is left of the first turns is there for good, such as modules that were imported: thousands of
                    # collections need not look at it again.
                    gc.collect()
                    gc.freeze()
                if turn == settings.rounds and settings.loud and self.rank == 0:
                    print(line(self.world_size, title, self.report.counts[title]), flush=True)
        self.report.problems += growth(self.report.samples)
        return self.report

    def _visit(self, title: str, turn: int, steps: int) -> None:
        began = time.monotonic()
        folder = [tempfile.mkdtemp(prefix="soak_") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        draw = random.Random(f"{self.settings.seed}/{self.world_size}/{title}/{turn}")
        hook, options = self.settings.variants[title]
        visit = Visit(Trainee(self.rank, hook, options, draw), draw, Path(folder[0]), self.world_size)
        try:
            visit.run(steps)
        except Exception as error:
            raise RuntimeError(f"{title}, turn {turn}, after {visit.counts['steps']} steps") from error
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder[0])
        self.report.problems += [
            f"{title}, {self.world_size} ranks, rank {self.rank}, turn {turn}: {problem}" for problem in visit.problems
        ]
        visit.counts["seconds"] += time.monotonic() - began  # type: ignore[assignment]
        self.report.counts[title] += visit.counts


class Visit:
    """A hook's turn: events by chance, with steps between them."""

    def __init__(self, trainee: Trainee, draw: random.Random, folder: Path, world_size: int):
        self.trainee, self.draw, self.folder, self.world_size = trainee, draw, folder, world_size
        self.counts: Counter = Counter()
        self.problems = trainee.problems
        self._tensors: list[int] = []
        self._age = 0
        """Steps since the hook was attached."""
        self._gathered = False
        """Whether no step has been taken since a save: until then a rank may hold state that it gathered for it."""

    def run(self, steps: int) -> None:
        decks = itertools.cycle((STAYING, LEAVING, STAYING * 2))
        events = list(next(decks))[::-1]
        while self.counts["steps"] < steps and not self._some_rank_gives_up():
            self._train(self._plan(self.draw.randint(2, 6)))
            events = events or self.draw.sample(deck := next(decks), len(deck))
            getattr(self, f"_{events.pop()}")()
        self._check()
        self._judge_tensors()
        self.trainee.handle.detach()
        self._compare("after detach()", self.trainee.left_behind())

    def _some_rank_gives_up(self) -> bool:
        problems = torch.tensor(len(self.problems))
        dist.all_reduce(problems, dist.ReduceOp.MAX)
        return problems.item() >= GIVE_UP

    # Steps.

    def _plan(self, count: int) -> list[Step]:
        return [Step.draw(self.draw, self.counts["steps"] + index, self.world_size) for index in range(count)]

    def _train(self, plan: list[Step]) -> None:
        for step in plan:
            self.trainee.step(step)
        self.counts["steps"] += len(plan)
        self.counts["overflows"] += sum(step.overflow is not None for step in plan)
        self._age += len(plan)
        self._gathered &= all(step.overflow is not None for step in plan)

    # Events.

    def _check(self) -> None:
        self.counts["checks"] += 1
        self.trainee.handle.synchronize()
        self._compare("after synchronize()", list(self.trainee.weights().values()))
        counted = [None] * self.world_size
        dist.all_gather_object(counted, self.trainee.handle.steps)
        if len(set(counted)) > 1:
            self.problems.append(f"ranks counted {counted} steps")
        if self._age >= 12 and not self._gathered:
            self._tensors.append(count_tensors())

    def _evaluate(self) -> None:
        self.counts["evaluations"] += 1
        self.trainee.evaluate()

    def _save(self) -> None:
        self.counts["saves"] += 1
        self._gathered = True
        self.trainee.save(self.folder)

    def _repeat(self) -> None:
        """Save, train, go back to what was saved, and train again: the weights are the same."""
        self._save()
        plan = self._plan(self.draw.randint(2, 8))
        self._train(plan)
        self.trainee.handle.synchronize()
        once = self.trainee.weights()
        self.counts["loads"] += 1
        self.trainee.load(self.folder, self.draw)
        self._train(plan)
        self.trainee.handle.synchronize()
        off = distance(once, self.trainee.weights())
        if not off <= REPEAT_TOLERANCE:
            self.problems.append(f"step {self.counts['steps']}: {len(plan)} steps came out different by {off:.1e}")

    def _detach(self) -> None:
        """And attach again, after a few steps of plain DDP."""
        self.counts["detached"] += 1
        self._judge_tensors()
        self.trainee.handle.detach()
        self._compare("after detach()", self.trainee.left_behind())
        self._train(self._plan(self.draw.randint(0, 2)))
        self.trainee.attach()

    def _wrap(self) -> None:
        self.counts["wrapped"] += 1
        self._judge_tensors()
        self.trainee.wrap_anew(self.draw)

    # Verdicts.

    def _compare(self, when: str, parts: list[torch.Tensor]) -> None:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.detach().contiguous().numpy().tobytes())
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, digest.hexdigest())
        if len(set(everyones)) > 1:
            self.problems.append(f"step {self.counts['steps']}: ranks differ {when}")

    def _judge_tensors(self) -> None:
        problem = growth_attached(self._tensors)
        if problem is not None:
            self.problems.append(f"step {self.counts['steps']}: {problem}")
        self._tensors, self._age = [], 0


def line(world_size: int, title: str, counts: Counter) -> str:
    """A hook's line."""
    figures = ", ".join(f"{counts[kind]:5d} {kind}" for kind in ("steps", "saves", "loads", "overflows"))
    return f"{world_size} ranks  {title:28s} {figures}  {counts['seconds']:6.1f} s"

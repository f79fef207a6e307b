"""One hook under examination, and what a check says of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bench.contenders import STEPS_TO_START, parse_hook, start_at_once
from ..comm.collectives import Communicator
from ..config.config import CommHookConfig
from ..config.registry import get_hook
from ..hooks.base import CommHook
from .subject import Subject, Weights, largest

PASS, FAIL, NOT_APPLICABLE, MEASURED, NOT_RUN = "pass", "FAIL", "n/a", "measured", "not run"


@dataclass
class Outcome:
    """What a check found on this rank, or on all of them."""

    status: str
    text: str = ""
    """For a failure: the rule, the value, the remedy. Otherwise what the table shows, or why the check does not apply."""
    figures: dict[str, Any] = field(default_factory=dict)


def passed(**figures: Any) -> Outcome:
    return Outcome(PASS, figures=figures)


def failed(text: str, **figures: Any) -> Outcome:
    return Outcome(FAIL, text, figures)


def not_applicable(reason: str, **figures: Any) -> Outcome:
    return Outcome(NOT_APPLICABLE, reason, figures)


def measured(text: str, **figures: Any) -> Outcome:
    return Outcome(MEASURED, text, figures)


@dataclass
class Case:
    """A hook, with the options under which it acts within a few steps, on the ranks and the device at hand."""

    label: str
    config: CommHookConfig
    comm: Communicator
    device: torch.device
    seed: int = 0

    @classmethod
    def make(cls, source: str | CommHookConfig, comm: Communicator, device: torch.device, seed: int = 0) -> Case:
        label = source.name if isinstance(source, CommHookConfig) else source
        config = start_at_once(parse_hook(source) if isinstance(source, str) else source)
        if len(comm.topology.nodes) == 1 and config.options.get("ranks_per_node") is None:
            # On one node a hook that saves traffic between nodes has nothing to do: let every rank count as a node.
            config = CommHookConfig(config.name, {**config.options, "ranks_per_node": 1})
        return cls(label, config, comm, device, seed)

    @property
    def hook_class(self) -> type[CommHook]:
        return get_hook(self.config.name)

    @property
    def options(self) -> Any:
        return self.config.build_options()

    @property
    def cycle(self) -> int:
        return self.options.cycle()

    @property
    def steps(self) -> int:
        """Enough to start, and for some cycles."""
        return STEPS_TO_START + max(8, 2 * self.cycle)

    def subject(self, *, delayed: bool = True) -> Subject:
        return Subject.make(self.config, self.comm.rank, self.device, delayed=delayed, seed=self.seed)

    def plain(self, *, delayed: bool = True) -> Subject:
        return Subject.make(None, self.comm.rank, self.device, delayed=delayed, seed=self.seed)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over ranks, in double precision; not by the all-reduce that hooks use, which is under examination."""
        return torch.stack(self.everyone(tensor.detach().double().cpu())).mean(0).to(tensor.device)

    def everyone(self, value: Any) -> list[Any]:
        return self.comm.gather_objects(value)

    def rounding(self, weights: Weights, steps: int | None = None) -> float:
        """By how much float32 sums in another order may move weights: two units in the last place of the largest, a step."""
        return (steps or self.steps) * 2**-22 * max(1.0, largest(weights))

    def differing_ranks(self, weights: Weights) -> list[int]:
        """Ranks whose weights are not rank 0's to the bit."""
        digests = self.everyone(digest(weights))
        return [rank for rank, each in enumerate(digests) if each != digests[0]]


def digest(tensors: Weights) -> str:
    """Equal where all bits are."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()

"""What a hook costs, by formula: bytes and collectives a step, from the model, the ranks and the hook's options.

Every formula is checked against the bytes that bench measures. A hook without a formula here simply has no prediction;
one from elsewhere brings its own with ``@predicts("its name")``.

Bytes are those that one node sends, as its network card sees them, averaged over the nodes: `between` leaves the node,
`within` stays in it. N is the size of the gradients, W the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .config import CommHookConfig
from .options import HookOptions
from .topology import Topology

MiB = 1024**2
FIRST_BUCKET, BUCKET = 1 * MiB, 25 * MiB
"""DDP's defaults: a small first bucket, so that communication starts early, and larger ones."""


@dataclass(frozen=True)
class Problem:
    """What is communicated, and among whom."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the trainable parameters, in the model's order."""
    topology: Topology
    itemsize: int = 4

    @classmethod
    def of(cls, model: torch.nn.Module, topology: Topology) -> Problem:
        trainable = [p for p in model.parameters() if p.requires_grad]
        return cls(tuple(tuple(p.shape) for p in trainable), topology, trainable[0].element_size())

    @property
    def world(self) -> int:
        return self.topology.world_size

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def buckets(self) -> list[list[tuple[int, ...]]]:
        """DDP's buckets: parameters in the order of their gradients, last layer first."""
        buckets: list[list[tuple[int, ...]]] = [[]]
        filled, limit = 0, FIRST_BUCKET
        for shape in reversed(self.shapes):
            buckets[-1].append(shape)
            filled += math.prod(shape) * self.itemsize
            if filled >= limit:
                buckets.append([])
                filled, limit = 0, BUCKET
        return [bucket for bucket in buckets if bucket]


@dataclass(frozen=True)
class Prediction:
    """Averages a step."""

    within: float = 0.0
    between: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(
            self.within + other.within, self.between + other.between, self.collectives + other.collectives
        )

    def __mul__(self, factor: float) -> Prediction:
        return Prediction(self.within * factor, self.between * factor, self.collectives * factor)


Formula = Callable[[Problem, Any], Prediction]
_formulas: dict[str, Formula] = {}


def predicts(*names: str) -> Callable[[Formula], Formula]:
    """Makes a function the formula of the hooks of these names."""

    def register(formula: Formula) -> Formula:
        _formulas.update(dict.fromkeys(names, formula))
        return formula

    return register


def predict(config: CommHookConfig, problem: Problem) -> Prediction | None:
    """The cost of a hook once it has started to act, or None where nobody knows."""
    from .registry import get_hook

    formula = _formulas.get(get_hook(config.name).name)
    if formula is None:
        return None
    return Prediction() if problem.world == 1 else formula(problem, config.build_options())


# Collectives.


def _ring(problem: Problem, ranks: Sequence[int], sent_by_each: float, calls: float) -> Prediction:
    """Every rank sends to its neighbour in the ring of ``ranks``."""
    if len(ranks) == 1:
        return Prediction()
    nodes = len(problem.topology.nodes)
    edges = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    inside = sum(problem.topology.same_node(a, b) for a, b in edges)
    return Prediction(inside * sent_by_each / nodes, (len(edges) - inside) * sent_by_each / nodes, calls)


def all_reduce(problem: Problem, nbytes: float, calls: float = 1, ranks: Sequence[int] | None = None) -> Prediction:
    """A ring all-reduce: each rank sends 2 (W - 1) / W times the data."""
    ranks = range(problem.world) if ranks is None else ranks
    return _ring(problem, list(ranks), 2 * (len(ranks) - 1) / len(ranks) * nbytes, calls)


def all_gather(problem: Problem, nbytes: float, calls: float = 1) -> Prediction:
    """A ring all-gather of ``nbytes`` in all: each rank sends (W - 1) / W of them."""
    return _ring(problem, range(problem.world), (problem.world - 1) / problem.world * nbytes, calls)


def all_to_all(problem: Problem, nbytes: float, calls: float = 1) -> Prediction:
    """Each rank sends 1 / W of its ``nbytes`` to every other."""
    topology, world = problem.topology, problem.world
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    inside = sum(topology.same_node(a, b) for a, b in pairs)
    each = nbytes / world / len(topology.nodes)
    return Prediction(inside * each, (len(pairs) - inside) * each, calls)


# Hooks.


def _width(problem: Problem, narrow: str | None) -> int:
    return min(problem.itemsize, 2) if narrow in ("fp16", "bf16") else problem.itemsize


@predicts("noop")
def noop(problem: Problem, options: Any) -> Prediction:
    return Prediction()


@predicts("allreduce")
def plain(problem: Problem, options: Any) -> Prediction:
    """2 (W - 1) / W x N, in one all-reduce a bucket: also what plain DDP does."""
    return all_reduce(problem, problem.elements * _width(problem, options.wrapper), len(problem.buckets()))


@predicts("fp16_compress", "bf16_compress")
def half(problem: Problem, options: Any) -> Prediction:
    """Half of plain DDP's."""
    return all_reduce(problem, problem.elements * min(problem.itemsize, 2), len(problem.buckets()))


# When a hook acts, read from how its options are called.

STEPS_TO_START = 2
"""Steps before a hook acts in a measurement: DDP rebuilds its buckets after the first."""


def start_at_once(config: CommHookConfig) -> CommHookConfig:
    """The same hook, acting from the third step on.

    Hooks let a run settle first (``start_powerSGD_iter``, ``start_localSGD_iter``, ``warmup_steps``: a thousand steps by
    torch's default). What they do then is what is measured, so those options are lowered, and only lowered.
    """
    present = {f.name: getattr(config.build_options(), f.name) for f in fields(config.build_options())}
    return CommHookConfig(config.name, {**config.options, **_lowered(present)})


def _lowered(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            inner = _lowered(value)
            if inner:
                found[name] = {**value, **inner}
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and _says_when_to_start(name)
            and value > STEPS_TO_START
        ):
            found[name] = STEPS_TO_START
    return found


def _says_when_to_start(name: str) -> bool:
    return name.startswith("start_") or name == "warmup_steps"


def cycle(options: HookOptions) -> int:
    """Steps after which a hook has done everything it does: a timed window holds whole cycles.

    ``period`` and ``period_group_size`` say so themselves; ``alternate`` takes turns between two steps.
    """
    lengths = [1]
    if isinstance(getattr(options, "period", None), int):
        lengths.append(options.period)  # type: ignore[attr-defined]
    lengths += [int(period) for period in (getattr(options, "period_group_size", None) or {})]
    if getattr(options, "alternate", False):
        lengths.append(2)
    return math.lcm(*lengths)

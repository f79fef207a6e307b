"""What communication costs, by formula: bytes and calls per step.

A :class:`Problem` is what is communicated and among whom; the functions below give the cost of one collective. Each hook puts
its own formula together from them (``CommHook.cost``). Every formula is checked against the bytes that are counted.

Bytes are those that one node sends, as its network card sees them, averaged over the nodes: `between` leaves the node,
`within` stays in it. N is the size of the gradients, W the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .topology import Topology
from .wire import itemsize_on_wire

MiB = 1024**2
FIRST_BUCKET, BUCKET = 1 * MiB, 25 * MiB
"""DDP's defaults: a small first bucket, so that communication starts early, and larger ones."""


@dataclass(frozen=True)
class Problem:
    """What is communicated, and among whom."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of the trainable parameters, in the model's order."""
    topology: Topology
    itemsize: int = 4

    @classmethod
    def of(cls, model: torch.nn.Module, topology: Topology) -> Problem:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(tuple((name, tuple(p.shape)) for name, p in trainable), topology, trainable[0][1].element_size())

    @property
    def world(self) -> int:
        return self.topology.world_size

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    def buckets(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """DDP's buckets: parameters in the order of their gradients, last layer first."""
        buckets: list[list[tuple[str, tuple[int, ...]]]] = [[]]
        filled, limit = 0, FIRST_BUCKET
        for name, shape in reversed(self.parameters):
            buckets[-1].append((name, shape))
            filled += math.prod(shape) * self.itemsize
            if filled >= limit:
                buckets.append([])
                filled, limit = 0, BUCKET
        return [bucket for bucket in buckets if bucket]


@dataclass(frozen=True)
class Prediction:
    """Means per step."""

    within: float = 0.0
    between: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(
            self.within + other.within, self.between + other.between, self.collectives + other.collectives
        )

    def __mul__(self, factor: float) -> Prediction:
        return Prediction(self.within * factor, self.between * factor, self.collectives * factor)


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


def all_reduce_gradients(problem: Problem, wire_dtype: str | None = None) -> Prediction:
    """All gradients between all ranks, one all-reduce a bucket, as DDP does."""
    nbytes = problem.elements * itemsize_on_wire(problem.itemsize, wire_dtype)
    return all_reduce(problem, nbytes, len(problem.buckets()))


def all_reduce_in_groups(
    problem: Problem, groups: Sequence[Sequence[int]], nbytes: float, calls: float = 1
) -> Prediction:
    """A mean inside each of some groups of ranks; a group of one sends nothing."""
    cost = Prediction(collectives=calls if any(len(ranks) > 1 for ranks in groups) else 0)
    for ranks in groups:
        cost += all_reduce(problem, nbytes, 0, ranks)
    return cost


def all_reduce_between_nodes(problem: Problem, nbytes: float, calls: float = 1) -> Prediction:
    """A mean over nodes of what is equal inside a node: each rank sends its part across, then shares it inside.

    For nodes of equal size.
    """
    groups = problem.topology.across
    cost = Prediction()
    for ranks in groups:
        cost += all_reduce(problem, nbytes / len(groups), 0, ranks)
    for ranks in problem.topology.nodes:
        cost += _ring(problem, ranks, (len(ranks) - 1) / len(ranks) * nbytes, 0)
    return cost + Prediction(collectives=calls * (1 if len(groups) == 1 else 2))


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

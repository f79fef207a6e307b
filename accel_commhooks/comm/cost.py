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

from .quantised import blocks_for, message_bytes
from .topology import Topology
from .wire import is_quantised, itemsize_on_wire, wire_dtype_named

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


def mean_over_ranks(problem: Problem, numbers: float, wire_dtype: str | None, calls: float = 1) -> Prediction:
    """A mean of so many numbers over all ranks in a wire type (hierarchy.MeanOverRanks).

    In 8-bit digits it is an all-to-all and an all-gather of what they are encoded as; among nodes of several ranks those
    travel between nodes only.
    """
    if not is_quantised(wire_dtype_named(wire_dtype)):
        return all_reduce(problem, numbers * itemsize_on_wire(problem.itemsize, wire_dtype), calls)
    nodes = problem.topology.nodes
    if len(nodes) in (1, problem.world):
        return quantised_mean(problem, numbers, range(problem.world), calls)
    inside = all_reduce_in_groups(problem, nodes, numbers * max(problem.itemsize, 4), calls)
    return inside + quantised_mean_between_nodes(problem, numbers, calls)


def quantised_mean_between_nodes(
    problem: Problem, numbers: float, calls: float = 1, *, with_lost: bool = False
) -> Prediction:
    """A mean over nodes of what is equal inside a node, in digits between nodes.

    ``with_lost`` if the ranks of a node tell each other what rounding took.
    """
    groups = _talking_across(problem)
    cost = Prediction(collectives=2 * calls)
    for ranks in groups:
        cost += quantised_mean(problem, numbers / len(groups), ranks, 0)
    for _ in range(2 if with_lost else 1):
        cost += _share_inside_nodes(problem, numbers * max(problem.itemsize, 4), calls)
    return cost


def quantised_mean(problem: Problem, numbers: float, ranks: Sequence[int], calls: float = 1) -> Prediction:
    """A mean among some ranks in digits: each sends every other its part, and the mean of its own part around the ring."""
    if len(ranks) == 1 or not numbers:
        return Prediction()
    part = message_bytes(blocks_for(math.ceil(numbers), len(ranks)))
    nodes = len(problem.topology.nodes)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    inside = sum(problem.topology.same_node(a, b) for a, b in pairs)
    directly = Prediction(inside * part / nodes, (len(pairs) - inside) * part / nodes, calls)
    return directly + _ring(problem, list(ranks), (len(ranks) - 1) * part, calls)


def all_reduce_gradients(problem: Problem, wire_dtype: str | None = None) -> Prediction:
    """All gradients between all ranks, bucket by bucket, as DDP does."""
    cost = Prediction()
    for bucket in problem.buckets():
        cost += mean_over_ranks(problem, sum(math.prod(shape) for _, shape in bucket), wire_dtype)
    return cost


def all_reduce_in_groups(
    problem: Problem, groups: Sequence[Sequence[int]], nbytes: float, calls: float = 1
) -> Prediction:
    """A mean inside each of some groups of ranks; a group of one sends nothing."""
    cost = Prediction(collectives=calls if any(len(ranks) > 1 for ranks in groups) else 0)
    for ranks in groups:
        cost += all_reduce(problem, nbytes, 0, ranks)
    return cost


def all_reduce_between_nodes(problem: Problem, nbytes: float, calls: float = 1) -> Prediction:
    """A mean over nodes of what is equal inside a node: some ranks send it across, then it is shared inside."""
    groups = _talking_across(problem)
    cost = Prediction(collectives=calls)
    for ranks in groups:
        cost += all_reduce(problem, nbytes / len(groups), 0, ranks)
    return cost + _share_inside_nodes(problem, nbytes, calls)


def _talking_across(problem: Problem) -> Sequence[Sequence[int]]:
    """Groups with a rank of each node: as many as nodes have ranks, or one if these numbers differ."""
    topology = problem.topology
    return topology.across if topology.is_even else [topology.leaders]


def _share_inside_nodes(problem: Problem, nbytes: float, calls: float) -> Prediction:
    """Every rank of a node tells the others its part, or the first one tells everything."""
    topology = problem.topology
    if len(topology.nodes) == problem.world:
        return Prediction()
    cost = Prediction(collectives=calls)
    for ranks in topology.nodes:
        sent = (len(ranks) - 1) * nbytes
        cost += Prediction(within=sent / len(topology.nodes))
    return cost


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

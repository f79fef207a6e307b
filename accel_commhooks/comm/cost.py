"""What a hook costs, by formula: bytes and collectives a step, from the model, the ranks and the hook's options.

Every formula is checked against the bytes that bench measures. A hook without a formula here simply has no prediction;
one from elsewhere brings its own with ``@predicts("its name")``.

Bytes are those that one node sends, as its network card sees them, averaged over the nodes: `between` leaves the node,
`within` stays in it. N is the size of the gradients, W the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config.config import CommHookConfig
from ..hooks.local_sgd.averaging import slice_bytes
from ..hooks.powersgd.lowrank import rank_for, square_side
from ..hooks.zero.sharding import GATHER_BYTES
from .topology import Topology

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


Formula = Callable[[Problem, Any], Prediction | None]
_formulas: dict[str, Formula] = {}


def predicts(*names: str) -> Callable[[Formula], Formula]:
    """Makes a function the formula of the hooks of these names."""

    def register(formula: Formula) -> Formula:
        _formulas.update(dict.fromkeys(names, formula))
        return formula

    return register


def predict(config: CommHookConfig, problem: Problem) -> Prediction | None:
    """The cost of a hook once it has started to act, or None where nobody knows."""
    from ..config.registry import get_hook

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


def _whole(problem: Problem, options: Any) -> Prediction:
    """All gradients between all ranks, as they are."""
    return all_reduce(problem, problem.elements * _width(problem, options.wrapper), len(problem.buckets()))


@predicts("allreduce")
def plain(problem: Problem, options: Any) -> Prediction:
    """2 (W - 1) / W x N, in one all-reduce a bucket: also what plain DDP does."""
    return _whole(problem, options)


@predicts("fp16_compress", "bf16_compress")
def half(problem: Problem, options: Any) -> Prediction:
    """Half of plain DDP's."""
    return all_reduce(problem, problem.elements * min(problem.itemsize, 2), len(problem.buckets()))


def _between_nodes(problem: Problem, nbytes: float, calls: float = 1) -> Prediction:
    """A mean over nodes of what is the same inside a node: each rank sends its part across, then shares it inside.

    For nodes of equal size.
    """
    groups = problem.topology.across
    cost = Prediction()
    for ranks in groups:
        cost += all_reduce(problem, nbytes / len(groups), 0, ranks)
    for ranks in problem.topology.nodes:
        cost += _ring(problem, ranks, (len(ranks) - 1) / len(ranks) * nbytes, 0)
    return cost + Prediction(collectives=calls * (1 if len(groups) == 1 else 2))


def _each(problem: Problem, groups: Sequence[Sequence[int]], nbytes: float, calls: float = 1) -> Prediction:
    """A mean inside each of some groups of ranks; a group of one sends nothing."""
    cost = Prediction(collectives=calls if len(groups[0]) > 1 else 0)
    for ranks in groups:
        cost += all_reduce(problem, nbytes, 0, ranks)
    return cost


def _low_rank(problem: Problem, options: Any, units: Sequence[_LowRankUnit]) -> Prediction:
    """Each unit sends factors and vectors: both factors a step, or one in turn under ``alternate``.

    All of it between all ranks, or between nodes after a full mean inside each. With one node there is nothing to compress.
    """
    if options.scope == "node" and len(problem.topology.nodes) == 1:
        return _whole(problem, options)
    send = _between_nodes if options.scope == "node" else all_reduce
    full = max(problem.itemsize, 4) if options.wrapper is None else 2
    narrow = 2 if options.wire_dtype is not None else full
    cost = Prediction()
    for unit in units:
        turns = 0.5 if options.alternate else 1.0
        calls = 1 if unit.factors == 0 or options.alternate else 2
        calls += options.wire_dtype is not None and unit.factors > 0 and unit.vectors > 0
        cost += send(problem, turns * unit.factors * narrow + unit.vectors * full, calls)
    if options.scope == "node":
        cost += _each(problem, problem.topology.nodes, problem.elements * full, len(problem.buckets()))
    return cost


@dataclass(frozen=True)
class _LowRankUnit:
    factors: int
    """Elements of P and Q."""
    vectors: int
    """Elements that travel as they are, with a flag for every matrix."""


@predicts("powersgd")
def powersgd(problem: Problem, options: Any) -> Prediction:
    """2 (W - 1) / W x (r (n + m) for every matrix [n, m], and the vectors); half of the first part with ``alternate``."""
    units = []
    for bucket in problem.buckets():
        factors = vectors = 0
        for name, shape in bucket:
            rows = shape[0] if shape else 1
            columns = math.prod(shape) // rows
            asked = options.rank_of(name)
            rank = rank_for(rows, columns, asked, options.min_compression_rate) if asked else 0
            factors += rank * (rows + columns)
            vectors += 1 if rank else rows * columns
        units.append(_LowRankUnit(factors, vectors))
    return _low_rank(problem, options, units)


@predicts("batched_powersgd")
def batched_powersgd(problem: Problem, options: Any) -> Prediction:
    """2 (W - 1) / W x 2 r sqrt(N): all gradients as one square."""
    side = square_side(problem.elements)
    rank = min(side, options.matrix_approximation_rank)
    return _low_rank(problem, options, [_LowRankUnit(2 * rank * side, 1)])


@predicts("post_localsgd")
def post_localsgd(problem: Problem, options: Any) -> Prediction:
    """Plain averaging's bytes every ``period`` steps; gradients inside the node at every step. Buffers not included.

    Where the gradients' group is everyone, replicas stay equal and are not averaged, unless what travels is their change.
    """
    slices = math.ceil(problem.elements * problem.itemsize / slice_bytes())
    full = problem.elements * _width(problem, options.wrapper)
    cost = Prediction()
    if options.post_local_gradient_allreduce and options.subgroup != "none":
        groups = problem.topology.nodes if options.subgroup == "node" else options.subgroup
        cost += _each(problem, groups, full, slices)
        by_change = options.outer or options.wire_dtype or options.overlap_steps
        if len(groups[0]) == problem.world and not by_change:
            return cost
    everyone = [range(problem.world)]
    if options.period_group_size:
        length = math.lcm(*options.period_group_size)
        for step in range(length):
            due = [period for period in options.period_group_size if step % period == 0]
            if due:
                size = options.period_group_size[max(due)]
                groups = [range(first, first + size) for first in range(0, problem.world, size)]
                cost += _each(problem, groups, full, slices) * (1 / length)
    else:
        narrow = problem.elements * _width(problem, options.wrapper or options.wire_dtype)
        cost += _each(problem, everyone, narrow, slices) * (1 / options.period)
    return cost


@predicts("zero_overlap")
def zero_overlap(problem: Problem, options: Any) -> Prediction | None:
    """A reduce-scatter of the gradients and a gather of the parameters: together what one all-reduce sends.

    On Gloo, where a reduce-scatter is an all-to-all; slices are padded to equal length. With whole parameters to single
    ranks the cost depends on where they lie, and nothing is predicted.
    """
    if not options.shard_buckets:
        return None
    width = _width(problem, options.wrapper or options.wire_dtype)
    gathered = _width(problem, options.wire_dtype)
    padded = sum(math.ceil(math.prod(shape) / problem.world) * problem.world for _, shape in problem.parameters)
    cost = all_to_all(problem, padded * width, len(problem.buckets()))
    stepped_together = problem.buckets() if options.step == "interleaved" else [list(problem.parameters)]
    cost += all_gather(problem, padded * gathered, sum(_pieces(problem, part) for part in stepped_together))
    if options.step == "optimizer":
        cost += all_reduce(problem, 4 * len(problem.parameters))
    return cost


def _pieces(problem: Problem, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Gathers for parameters that are stepped together: in the model's order, until a piece is full."""
    order = {name: index for index, (name, _) in enumerate(problem.parameters)}
    pieces, filled = 0, 0
    for _, shape in sorted(parameters, key=lambda parameter: order[parameter[0]]):
        filled += math.prod(shape) * problem.itemsize
        if filled >= GATHER_BYTES:
            pieces, filled = pieces + 1, 0
    return pieces + (filled > 0)

"""What PowerSGD sends, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...comm.cost import (
    Prediction,
    Problem,
    all_reduce,
    all_reduce_between_nodes,
    all_reduce_gradients,
    all_reduce_in_groups,
)
from ...comm.wire import itemsize_on_wire
from .lowrank import square_side
from .options import LowRankOptions, PowerSGDOptions


def powersgd_cost(options: PowerSGDOptions, problem: Problem) -> Prediction | None:
    """2 (W - 1) / W x (r (n + m) for every matrix [n, m], and the vectors); half of the first part with ``alternate``."""
    units = []
    for bucket in problem.buckets():
        factors = vectors = 0
        for name, shape in bucket:
            rows, columns, rank = options.matrix_of(name, shape)
            factors += rank * (rows + columns)
            vectors += 1 if rank else rows * columns
        units.append(_Sent(factors, vectors))
    return _cost(options, problem, units)


def batched_powersgd_cost(options: LowRankOptions, problem: Problem) -> Prediction | None:
    """2 (W - 1) / W x 2 r sqrt(N): all gradients as one square."""
    side = square_side(problem.elements)
    rank = min(side, options.matrix_approximation_rank)
    return _cost(options, problem, [_Sent(2 * rank * side, 1)])


@dataclass(frozen=True)
class _Sent:
    """What is compressed together."""

    factors: int
    """Elements of P and Q."""
    vectors: int
    """Elements that travel as they are, among them a flag for every matrix."""


def _cost(options: LowRankOptions, problem: Problem, units: Sequence[_Sent]) -> Prediction | None:
    """Each unit sends factors and vectors: both factors a step, or one in turn under ``alternate``.

    All of it between all ranks, or between nodes after a full mean inside each. With one node there is nothing to compress.
    There is no formula for nodes with different numbers of ranks.
    """
    if options.scope == "node" and not problem.topology.is_even:
        return None
    if options.scope == "node" and len(problem.topology.nodes) == 1:
        return all_reduce_gradients(problem)
    send = all_reduce_between_nodes if options.scope == "node" else all_reduce
    full = max(problem.itemsize, 4)
    narrow = itemsize_on_wire(full, options.wire_dtype)
    cost = Prediction()
    for unit in units:
        turns = 0.5 if options.alternate else 1.0
        calls = 1 if unit.factors == 0 or options.alternate else 2
        calls += options.wire_dtype is not None and unit.factors > 0 and unit.vectors > 0
        cost += send(problem, turns * unit.factors * narrow + unit.vectors * full, calls)
    if options.scope == "node":
        cost += all_reduce_in_groups(problem, problem.topology.nodes, problem.elements * full, len(problem.buckets()))
    return cost

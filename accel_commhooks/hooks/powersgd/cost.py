"""What PowerSGD sends, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...comm.cost import (
    Prediction,
    Problem,
    all_reduce,
    all_reduce_between_nodes,
    all_reduce_gradients,
    all_reduce_in_groups,
    mean_over_ranks,
    quantised_mean_between_nodes,
)
from ...comm.wire import is_quantised, itemsize_on_wire, wire_dtype_named
from .lowrank import square_side
from .options import LowRankOptions, PowerSGDOptions
from .sending import in_parcels


def powersgd_cost(options: PowerSGDOptions, problem: Problem) -> Prediction:
    """2 (W - 1) / W x (r (n + m) for every matrix [n, m], and the vectors); half of the first part with ``alternate``."""
    units = []
    for bucket in problem.buckets():
        unit = _Unit()
        for name, shape in bucket:
            rows, columns, rank = options.matrix_of(name, shape)
            if rank:
                unit.matrices.append((rank * rows, rank * columns))
            else:
                unit.vectors += rows * columns
        units.append(unit)
    return _cost(options, problem, units)


def batched_powersgd_cost(options: LowRankOptions, problem: Problem) -> Prediction:
    """2 (W - 1) / W x 2 r sqrt(N): all gradients as one square."""
    side = square_side(problem.elements)
    rank = min(side, options.rank)
    return _cost(options, problem, [_Unit([(rank * side, rank * side)])])


@dataclass
class _Unit:
    """What is compressed together."""

    matrices: list[tuple[int, int]] = field(default_factory=list)
    """Elements of P and of Q of each."""
    vectors: int = 0
    """Elements that travel as they are."""

    @property
    def factors(self) -> int:
        return sum(map(sum, self.matrices))

    @property
    def small(self) -> int:
        """Vectors, and a flag for every matrix."""
        return self.vectors + len(self.matrices)


def _cost(options: LowRankOptions, problem: Problem, units: Sequence[_Unit]) -> Prediction:
    """Each unit sends factors and vectors: both factors a step, or one in turn under ``alternate``.

    All of it between all ranks, or between nodes after a full mean inside each. With one node there is nothing to compress.
    """
    if options.scope == "node" and len(problem.topology.nodes) == 1:
        return all_reduce_gradients(problem)
    send = all_reduce_between_nodes if options.scope == "node" else all_reduce
    full = max(problem.itemsize, 4)
    cost = Prediction()
    if is_quantised(wire_dtype_named(options.wire_dtype)):
        for unit in units:
            cost += send(problem, unit.small * full, unit.small > 0)
        cost += _in_digits(options, problem, units)
    else:
        narrow, turns = itemsize_on_wire(full, options.wire_dtype), 0.5 if options.alternate else 1.0
        for unit in units:
            calls = 1 if unit.factors == 0 or options.alternate else 2
            calls += options.wire_dtype is not None and unit.factors > 0 and unit.small > 0
            cost += send(problem, turns * unit.factors * narrow + unit.small * full, calls)
    if options.scope == "node":
        cost += all_reduce_in_groups(problem, problem.topology.nodes, problem.elements * full, len(problem.buckets()))
    return cost


def _in_digits(options: LowRankOptions, problem: Problem, units: Sequence[_Unit]) -> Prediction:
    """Each side's factors, in a few parcels in the model's order."""
    matrices = [matrix for unit in reversed(units) for matrix in reversed(unit.matrices)]
    cost = Prediction()
    for side, sizes in zip(("p", "q"), zip(*matrices, strict=True), strict=False):
        makes_the_result = side == "q" or options.alternate
        for parcel in in_parcels(sizes):
            if options.scope == "node":
                with_lost = makes_the_result and options.use_error_feedback
                part = quantised_mean_between_nodes(problem, parcel.numel, with_lost=with_lost)
            else:
                part = mean_over_ranks(problem, parcel.numel, options.wire_dtype)
            cost += part * (0.5 if options.alternate else 1.0)
    return cost

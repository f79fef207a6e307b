"""What ZeRO overlap sends, by formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...comm.cost import Prediction, Problem, all_gather, all_reduce, all_to_all
from ...comm.quantised import blocks_of, message_bytes
from ...comm.wire import is_quantised, itemsize_on_wire, wire_dtype_named
from .options import ZeroOverlapOptions
from .sharding import GATHER_BYTES


def zero_overlap_cost(options: ZeroOverlapOptions, problem: Problem) -> Prediction | None:
    """A reduce-scatter of the gradients and a gather of the parameters: together what one all-reduce sends.

    On Gloo, where a reduce-scatter is an all-to-all; slices are padded to equal length. With whole parameters to single
    ranks the cost depends on where they lie, and nothing is predicted.
    """
    if not options.shard_buckets:
        return None
    chunks = [math.ceil(math.prod(shape) / problem.world) for _, shape in problem.parameters]
    if is_quantised(wire_dtype_named(options.wire_dtype)):
        sent: float = problem.world * message_bytes(sum(map(blocks_of, chunks)))
    else:
        sent = problem.world * sum(chunks) * itemsize_on_wire(problem.itemsize, options.wire_dtype)
    cost = all_to_all(problem, sent, len(problem.buckets()))
    stepped_together = problem.buckets() if options.step == "interleaved" else [list(problem.parameters)]
    cost += all_gather(problem, sent, sum(_gathers(problem, part) for part in stepped_together))
    if options.step == "optimizer":
        cost += all_reduce(problem, 4 * len(problem.parameters))
    return cost


def _gathers(problem: Problem, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Gathers for parameters that are stepped together: in the model's order, until a piece is full."""
    order = {name: index for index, (name, _) in enumerate(problem.parameters)}
    pieces, filled = 0, 0
    for _, shape in sorted(parameters, key=lambda parameter: order[parameter[0]]):
        filled += math.prod(shape) * problem.itemsize
        if filled >= GATHER_BYTES:
            pieces, filled = pieces + 1, 0
    return pieces + (filled > 0)

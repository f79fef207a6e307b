"""What local SGD sends, by formula."""

from __future__ import annotations

import math

from ...comm.cost import Prediction, Problem, all_reduce_in_groups, mean_over_ranks
from .averaging import slice_bytes
from .options import PostLocalSGDOptions


def post_localsgd_cost(options: PostLocalSGDOptions, problem: Problem) -> Prediction:
    """Plain averaging's bytes every ``period`` steps; gradients inside the node at every step. Buffers not included.

    Where gradients are averaged among all ranks, replicas stay equal and are not averaged, unless their changes travel.
    """
    slices = math.ceil(problem.elements * problem.itemsize / slice_bytes())
    full = problem.elements * problem.itemsize
    cost = Prediction()
    if options.post_local_gradient_allreduce and options.subgroup != "none":
        groups = list(problem.topology.nodes if options.subgroup == "node" else options.subgroup)
        cost += all_reduce_in_groups(problem, groups, full, slices)
        if len(groups[0]) == problem.world and not options.averages_changes():
            return cost
    if options.period_group_size:
        length = math.lcm(*options.period_group_size)
        for step in range(length):
            due = [period for period in options.period_group_size if step % period == 0]
            if due:
                size = options.period_group_size[max(due)]
                neighbours = [range(first, first + size) for first in range(0, problem.world, size)]
                cost += all_reduce_in_groups(problem, neighbours, full, slices) * (1 / length)
    else:
        cost += mean_over_ranks(problem, problem.elements, options.wire_dtype, slices) * (1 / options.period)
    return cost

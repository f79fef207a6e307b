"""Means in two levels: inside a node first, between nodes afterwards.

Between nodes, the i-th ranks of all nodes average the i-th part of a tensor and then share it inside their node, so that
every network card carries an equal part. If nodes have different numbers of ranks, one rank of each takes part.
"""

from __future__ import annotations

import torch

from .chains import Steps
from .collectives import Communicator
from .means import steps_of_mean
from .pending import PendingResult
from .survivors import Group
from .wire import is_quantised, narrows


class NodeReduction:
    """The groups and the arithmetic of two-level means over a communicator's topology."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        topology = comm.topology
        self.node = comm.subgroup(topology.nodes)
        self._even = topology.is_even
        self._across = comm.subgroup(topology.across if self._even else [topology.leaders])
        # Nodes are weighted by their numbers of ranks, so that the mean over nodes is the mean over ranks.
        self._weight = self.node.size * len(topology.nodes) / comm.size

    def inside(self, tensor: torch.Tensor) -> PendingResult:
        """The mean over this node's ranks, in place."""
        return self.comm.all_reduce(tensor, group=self.node)

    def between(
        self, tensor: torch.Tensor, wire_dtype: torch.dtype | None = None, lost: torch.Tensor | None = None
    ) -> PendingResult:
        """The mean over nodes, weighted by their ranks, of a tensor that is the same on all ranks of a node; in place.

        ``lost`` is as in :func:`~.means.steps_of_mean`.
        """
        return self.comm.chain(self._between(tensor, wire_dtype, lost), tensor)

    def steps_of_mean(
        self, tensor: torch.Tensor, wire_dtype: torch.dtype | None, lost: torch.Tensor | None = None
    ) -> Steps:
        """The mean over all ranks in place, narrowed between nodes only; as a chain."""
        yield from steps_of_mean(self.comm, tensor, self.node, None)
        yield from self._between(tensor, wire_dtype, lost, alike=False)

    def _between(
        self, tensor: torch.Tensor, wire_dtype: torch.dtype | None, lost: torch.Tensor | None, *, alike: bool = True
    ) -> Steps:
        """What rounding takes here, it takes of a node's mean.

        Where the ranks of a node must stay ``alike`` all of them lose the same; otherwise one has lost it for all.
        """
        if not tensor.numel():
            return
        if self._weight != 1:
            tensor.mul_(self._weight)
        if self._even and self.node.size == 1:
            yield from steps_of_mean(self.comm, tensor, self._across, wire_dtype, lost)
        elif self._even:
            yield from self._part_by_part(tensor, wire_dtype, lost, alike)
        else:
            yield from self._by_leaders(tensor, wire_dtype, lost, alike)

    def _part_by_part(
        self, tensor: torch.Tensor, wire_dtype: torch.dtype | None, lost: torch.Tensor | None, alike: bool
    ) -> Steps:
        ranks = self.node.size
        size = -(-tensor.numel() // ranks)
        place = slice(self.node.index * size, (self.node.index + 1) * size)
        whole = tensor.new_zeros(size * ranks)
        whole[: tensor.numel()].copy_(tensor.view(-1))
        part = whole[place].clone()
        part_lost = None if lost is None else torch.empty_like(part)
        yield from steps_of_mean(self.comm, part, self._across, wire_dtype, part_lost)
        yield from self._share(part, whole, tensor)
        if lost is None or part_lost is None:
            return
        if alike:
            yield from self._share(part_lost, whole, lost)
        else:
            whole.zero_()
            whole[place].add_(part_lost, alpha=ranks)
            lost.view(-1).copy_(whole[: lost.numel()])

    def _share(self, part: torch.Tensor, whole: torch.Tensor, out: torch.Tensor) -> Steps:
        """``out`` becomes the parts of all ranks of this node."""
        shared = self.comm.all_gather(whole, part, group=self.node)
        yield
        shared.wait()
        out.view(-1).copy_(whole[: out.numel()])

    def _by_leaders(
        self, tensor: torch.Tensor, wire_dtype: torch.dtype | None, lost: torch.Tensor | None, alike: bool
    ) -> Steps:
        yield from steps_of_mean(self.comm, tensor, self._across, wire_dtype, lost)
        if lost is not None:
            # Of weighted values; and what one rank has lost for all of its node counts for one rank only.
            lost.div_(self._weight).mul_(1 if alike else self.node.size)
        for each in [tensor] if lost is None or not alike else [tensor, lost]:
            shared = self.comm.broadcast(each, group=self.node)
            yield
            shared.wait()


class MeanOverRanks:
    """The mean over all ranks in a wire type, on the way that suits it.

    That is an all-reduce in the wire's type. But digits are sent to every rank that is to add them up, which a ring does not
    do; so where nodes have several ranks, each node has its own mean first, and only that travels in digits.
    """

    def __init__(
        self,
        comm: Communicator,
        wire_dtype: torch.dtype | None,
        *,
        group: Group | None = None,
        in_background: bool = False,
    ):
        """``group`` is another group of all ranks. What travels ``in_background`` goes on only when it is told to."""
        self._comm, self._wire_dtype = comm, wire_dtype
        self._group, self._patient = group or comm.everyone, in_background
        several = 1 < len(comm.topology.nodes) < comm.size
        self._levels = NodeReduction(comm) if is_quantised(wire_dtype) and several else None

    def __call__(self, tensor: torch.Tensor, lost: torch.Tensor | None = None) -> PendingResult:
        """In place; ``lost``, for digits only, is as in :func:`~.means.steps_of_mean`."""
        dtype = self._wire_dtype
        if not is_quantised(dtype) or not narrows(tensor, dtype):
            return self._comm.all_reduce(tensor, group=self._group, wire_dtype=dtype)
        if self._levels is not None:
            steps = self._levels.steps_of_mean(tensor, dtype, lost)
        else:
            steps = steps_of_mean(self._comm, tensor, self._group, dtype, lost)
        return self._comm.chain(steps, tensor, patient=self._patient)

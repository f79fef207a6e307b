"""Means in two levels: inside a node first, between nodes afterwards.

Between nodes, the i-th ranks of all nodes average the i-th part of a tensor and then share it inside their node, so that
every network card carries an equal part. If nodes have different numbers of ranks, one rank of each takes part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .collectives import Communicator
from .pending import PendingCollective, PendingResult


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

    def inside(self, tensor: torch.Tensor) -> PendingCollective:
        """The mean over this node's ranks, in place."""
        return self.comm.all_reduce(tensor, group=self.node)

    def between(self, tensor: torch.Tensor, wire_dtype: torch.dtype | None = None) -> PendingResult:
        """The mean over nodes, weighted by their ranks, of a tensor that is the same on all ranks of a node; in place."""
        if self._weight != 1:
            tensor.mul_(self._weight)
        if not self._even:
            pending = self.comm.all_reduce(tensor, group=self._across, wire_dtype=wire_dtype)
            return _TwoStageMean(lambda: self.comm.broadcast(pending.wait(), group=self.node).wait())
        if self.node.size == 1:
            return self.comm.all_reduce(tensor, group=self._across, wire_dtype=wire_dtype)
        part_size = -(-tensor.numel() // self.node.size)
        padded = tensor.new_zeros(part_size * self.node.size)
        padded[: tensor.numel()].copy_(tensor.view(-1))
        part = padded[self.node.index * part_size :][:part_size].clone()
        pending = self.comm.all_reduce(part, group=self._across, wire_dtype=wire_dtype)

        def share() -> None:
            self.comm.all_gather(padded, pending.wait(), group=self.node).wait()
            tensor.view(-1).copy_(padded[: tensor.numel()])

        return _TwoStageMean(share)


class _TwoStageMean:
    """A mean whose second collective is issued by ``wait()``, which every rank calls in the same order."""

    def __init__(self, second_part: Callable[[], object]):
        self._second_part: Callable[[], object] | None = second_part

    def wait(self) -> None:
        if self._second_part is not None:
            second_part, self._second_part = self._second_part, None
            second_part()

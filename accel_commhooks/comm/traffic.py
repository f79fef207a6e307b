"""How bytes are counted: what this rank sends, within its node and between nodes separately.

The counts follow the algorithms that backends use for large messages: rings for all-reduce, reduce-scatter and all-gather
(each rank sends to its right neighbour only), direct sends for all-to-all, a binomial tree for broadcast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .topology import Topology


@dataclass
class Traffic:
    """What one rank has sent, by ``(collective, scope)``; the scope is 'within' a node or 'between' nodes."""

    rank: int
    topology: Topology
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    """Seconds the host spent in wait(). On an accelerator waiting happens on a stream and costs the host nothing."""

    def scope(self, scope: str) -> int:
        """Bytes sent within a node, or between nodes."""
        return sum(count for (_, where), count in self.sent.items() if where == scope)

    def count_all_reduce(self, ranks: Sequence[int], nbytes: int) -> None:
        """A ring: each rank sends 2 (W - 1) / W times the data to its right neighbour."""
        self._count_ring("all_reduce", ranks, 2 * (len(ranks) - 1) * nbytes / len(ranks))

    def count_reduce_scatter(self, ranks: Sequence[int], nbytes: int) -> None:
        """A ring: each rank sends (W - 1) / W times the data of all chunks."""
        self._count_ring("reduce_scatter", ranks, (len(ranks) - 1) * nbytes / len(ranks))

    def count_all_gather(self, ranks: Sequence[int], nbytes: int) -> None:
        """A ring: each rank sends W - 1 chunks of ``nbytes``."""
        self._count_ring("all_gather", ranks, (len(ranks) - 1) * nbytes)

    def _count_ring(self, collective: str, ranks: Sequence[int], nbytes: float) -> None:
        self.calls[collective] += 1
        self._count(collective, self._right_neighbour(ranks), nbytes)

    def count_direct(self, collective: str, nbytes_to: dict[int, int]) -> None:
        """A call in which this rank sends to each of some ranks directly."""
        self.calls[collective] += 1
        for other, nbytes in nbytes_to.items():
            if other != self.rank:
                self._count(collective, other, nbytes)

    def count_broadcast(self, ranks: Sequence[int], source: int, nbytes: int) -> None:
        """A binomial tree from the ``source``-th of ``ranks``."""
        size = len(ranks)
        position = (ranks.index(self.rank) - source) % size
        children = [ranks[(child + source) % size] for child in binomial_children(position, size)]
        self.count_direct("broadcast", dict.fromkeys(children, nbytes))

    def of_plain_ddp(self, gradient_bytes: int) -> dict[str, float]:
        """What this rank would send, by scope, if DDP all-reduced so many bytes over all ranks."""
        counts, world_size = {"within": 0.0, "between": 0.0}, self.topology.world_size
        if world_size > 1:
            right = self._right_neighbour(range(world_size))
            counts[self._scope(right)] = 2 * (world_size - 1) * gradient_bytes / world_size
        return counts

    def _right_neighbour(self, ranks: Sequence[int]) -> int:
        return ranks[(ranks.index(self.rank) + 1) % len(ranks)]

    def _scope(self, other: int) -> str:
        return "within" if self.topology.same_node(self.rank, other) else "between"

    def _count(self, collective: str, other: int, nbytes: float) -> None:
        self.sent[collective, self._scope(other)] += round(nbytes)


def binomial_children(position: int, size: int) -> list[int]:
    """The positions that ``position`` sends to in a binomial tree that starts at position 0."""
    children, bit = [], 1
    while bit < size:
        if position < bit and position + bit < size:
            children.append(position + bit)
        bit *= 2
    return children

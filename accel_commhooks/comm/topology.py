"""Which ranks share a node, and the groups of ranks made from that.

Ranks that share a network card are on one node. The hosts themselves are asked (boot id and network namespace); the number
of visible devices says nothing where SLURM shows one GPU per task, on CPU ranks, or in pods.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..config.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """``node_of[r]`` is the node of rank ``r`` of the group that was asked; nodes are numbered by their first rank."""

    node_of: tuple[int, ...]

    @classmethod
    def from_keys(cls, keys: Sequence[str]) -> Topology:
        """Ranks with equal keys share a node."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(key, len(numbers)) for key in keys))

    @classmethod
    def even(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Consecutive blocks of ``ranks_per_node`` ranks."""
        if world_size % ranks_per_node:
            raise ConfigError(
                f"ranks_per_node must divide the number of ranks, but got {ranks_per_node} for {world_size} ranks; "
                "leave it out to detect the nodes"
            )
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        count = max(self.node_of) + 1
        return tuple(tuple(r for r, n in enumerate(self.node_of) if n == node) for node in range(count))

    @property
    def is_even(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @cached_property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """Groups with one rank of each node: the i-th ranks together; needs nodes of equal size."""
        return tuple(zip(*self.nodes, strict=True))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return tuple(ranks[0] for ranks in self.nodes)

    def same_node(self, a: int, b: int) -> bool:
        return self.node_of[a] == self.node_of[b]


def host_key() -> str:
    """A text that is equal in two processes exactly when they run on one node."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"

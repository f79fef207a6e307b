"""What bench measures besides time: bytes counted by us and by the network cards, time spent waiting, memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..attachment.handle import Attachment
from ..comm.topology import Topology

MB = 1e6


@dataclass(frozen=True)
class Counters:
    """Running totals of one rank (``counted``, ``waited``) and of the node it is on (``card``)."""

    counted_within: float = 0.0
    counted_between: float = 0.0
    collectives: float = 0.0
    waited: float = 0.0
    card_within: float = 0.0
    card_between: float = 0.0
    knows: bool = True
    """Whether the traffic goes through our counters: not that of plain DDP or of a foreign hook."""

    @classmethod
    def read(cls, handle: Attachment | None) -> Counters:
        within, between = card_bytes()
        if handle is None or not handle.hook.counted:
            return cls(card_within=within, card_between=between, knows=False)
        traffic = handle.comm.traffic
        return cls(
            traffic.scope("within"),
            traffic.scope("between"),
            sum(traffic.calls.values()),
            traffic.waited,
            within,
            between,
        )

    def __sub__(self, before: Counters) -> Counters:
        names = [f.name for f in fields(self) if f.name != "knows"]
        return Counters(**{n: getattr(self, n) - getattr(before, n) for n in names}, knows=self.knows)


def card_bytes() -> tuple[int, int]:
    """Bytes sent so far over loopback and over the other network devices; zeros where the system does not report them."""
    within = between = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            device, _, figures = line.partition(":")
            sent = int(figures.split()[8])
            if device.strip() == "lo":
                within += sent
            else:
                between += sent
    return within, between


def summary(everyone: Sequence[tuple[float, Counters]], topology: Topology, steps: int) -> dict[str, float | None]:
    """Figures of one turn from those of all ranks: the slowest rank's time, and bytes per node and step."""
    counters = [counted for _, counted in everyone]
    nodes = len(topology.nodes)
    knows = counters[0].knows

    def sent(name: str) -> float:
        return sum(getattr(c, name) for c in counters) / nodes / steps / MB

    def card(name: str) -> float:
        """Ranks of one node read the same cards, so only one of them counts."""
        return sum(getattr(counters[rank], name) for rank in topology.leaders) / nodes / steps / MB

    return {
        "s_per_step": max(seconds for seconds, _ in everyone),
        "blocked_s": sum(c.waited for c in counters) / len(counters) / steps if knows else None,
        "collectives": counters[0].collectives / steps if knows else None,
        "mb_within": sent("counted_within") if knows else None,
        "mb_between": sent("counted_between") if knows else None,
        "card_mb_within": card("card_within"),
        "card_mb_between": card("card_between"),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors an optimizer keeps on this rank."""
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its shard's optimizer there
    tensors = [v for state in optimizer.state.values() for v in _leaves(state)]
    return sum(_local(t).numel() * t.element_size() for t in tensors)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for inner in value.values() for leaf in _leaves(inner)] if isinstance(value, dict) else []


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, as FSDP's are


class PeakMemory:
    """Peak memory of this process above what it held at the start, on its device.

    On a CPU this is the resident size. Freed memory is returned to the system first; otherwise the first contender would
    be charged for memory that all later ones reuse.
    """

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cpu":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self._start = _status("VmRSS")
        else:
            torch.get_device_module(device).reset_peak_memory_stats(device)
            self._start = torch.get_device_module(device).memory_allocated(device)

    def read(self) -> int:
        if self._device.type == "cpu":
            return max(0, _status("VmHWM") - self._start)
        return torch.get_device_module(self._device).max_memory_allocated(self._device) - self._start


def _status(name: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
    return 0

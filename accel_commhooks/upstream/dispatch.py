"""Counting what torch does: calls to its operators, reads that make the host wait, kernels on a device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "is_nonzero")


class Calls(TorchDispatchMode):
    """Counts the operators that are called within it, and those of them that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.calls[name] += 1
        to_host = "_to_copy" in name and (kwargs or {}).get("device") == torch.device("cpu")
        if to_host or any(read in name for read in READS):
            self.reads[name] += 1
        return function(*args, **(kwargs or {}))


Interval = tuple[float, float]


def device_kernels(profile: Any) -> list[tuple[str, Interval]]:
    """Name and (start, end) in microseconds of everything that a torch.profiler saw on a CUDA device."""
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]

"""What a process holds: resident memory, threads, open descriptors and live tensors; and whether it grows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
from dataclasses import dataclass

import torch

KINDS = ("memory_mb", "threads", "descriptors", "tensors")

MEMORY_TOLERANCE_MB = 2.0
"""Of resident memory, between two medians.

The allocator keeps pages that lie between live blocks, so what is resident is not quite what is in use: medians of runs without
a leak differed by up to 0.8 MB, and this is two and a half times that. In a soak of 10,000 steps some 3,500 of a world size's
5,000 lie between the medians, so 600 bytes that are lost at every step are seen; the model's weights are 8 kB.
"""
TENSORS_TOLERANCE = 17
"""Of live tensors while a hook stays attached, between two medians: what is made when a step is the first of its kind.

PowerSGD copies the residuals of the five matrices when gradients are first discarded, and AdamW has three tensors for each of
the four parameters of the two heads when those are first used. A tensor that is lost at every step is more after 23 steps.
"""


@dataclass(frozen=True)
class Sample:
    memory_mb: float
    threads: int
    descriptors: int
    tensors: int


def take_sample() -> Sample:
    """What this process holds now."""
    tensors = count_tensors()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed pages go back, where the C library can do that
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        memory_mb=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        tensors=tensors,
    )


def count_tensors() -> int:
    """Live tensors; those in garbage do not count."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def ends(values: list[float]) -> tuple[float, float]:
    """The medians of the first and the last quarter."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def growth(samples: list[Sample]) -> list[str]:
    """What has grown between the first and the last quarter of samples that were taken with nothing attached.

    Then threads, descriptors and tensors are what there was before, so none of them may be more. There is nothing to compare in
    fewer than four.
    """
    grown = []
    if len(samples) < 4:
        return grown
    for kind in KINDS:
        first, last = ends([getattr(sample, kind) for sample in samples])
        if last - first > (MEMORY_TOLERANCE_MB if kind == "memory_mb" else 0):
            grown.append(f"{kind} grew from {first:g} to {last:g}")
    return grown


def growth_attached(tensors: list[int]) -> str | None:
    """Whether the tensors grew in number while one hook stayed attached."""
    if len(tensors) < 4:
        return None
    first, last = ends([float(each) for each in tensors])
    return f"tensors grew from {first:g} to {last:g} under one attachment" if last - first > TENSORS_TOLERANCE else None

"""What travels in digits together, whatever DDP's buckets are.

The digits of a number depend on its neighbours, which share a scale with it, and on which rank rounds it a second time. Buckets
are others in the first step of a run than in the rest; were they sent as they are, a resumed run would differ from one that
was not interrupted. So the parts of a parcel are given by the model: its parameters in the order in which gradients arrive, the
last first, each beginning a block of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm.quantised import in_blocks


@dataclass(frozen=True)
class Part:
    """One part's place in its parcel."""

    index: int
    """Of the part in the model."""
    offset: int
    numel: int

    def of(self, parcel: torch.Tensor) -> torch.Tensor:
        """This part of a flat parcel."""
        return parcel[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class Parcel:
    """Some parts, side by side."""

    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        last = self.parts[-1]
        return last.offset + in_blocks(last.numel)

    @property
    def is_padded(self) -> bool:
        return self.numel > sum(part.numel for part in self.parts)


def parcels(sizes: Sequence[int], limit: int, *, first: int | None = None) -> list[Parcel]:
    """Parts of these sizes, from the last to the first, in parcels that are closed when they hold ``limit`` numbers.

    The one that leaves first may have a limit of its own.
    """
    made: list[Parcel] = []
    parts: list[Part] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        parts.append(Part(index, filled, sizes[index]))
        filled += in_blocks(sizes[index])
        if filled >= (limit if made or first is None else first):
            made.append(Parcel(tuple(parts)))
            parts, filled = [], 0
    return [*made, Parcel(tuple(parts))] if parts else made

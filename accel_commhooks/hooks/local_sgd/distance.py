"""How far a replica is from the mean of all: the figure that tells whether the period is too long."""

from __future__ import annotations

import torch


class Distance:
    """The distance of this rank's tensors from their means, relative to the means' size; summed on the device."""

    def __init__(self) -> None:
        self._apart: torch.Tensor | None = None
        self._size: torch.Tensor | None = None

    def add(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        apart = torch.linalg.vector_norm((own - mean).float()).square()
        size = torch.linalg.vector_norm(mean.float()).square()
        self._apart = apart if self._apart is None else self._apart + apart
        self._size = size if self._size is None else self._size + size

    def relative(self) -> torch.Tensor | None:
        if self._apart is None or self._size is None:
            return None
        return (self._apart / self._size.clamp_min(1e-30)).sqrt()

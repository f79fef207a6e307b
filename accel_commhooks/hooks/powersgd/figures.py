"""How well the rank approximates gradients: the hooks' figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...upstream import foreach
from .units import Unit

SAMPLE_EVERY = 20  # steps between two samples: each reads every gradient once more


class CompressionStats:
    """Every few steps: how large the residual is, and how much of the gradient lies in the factors' span.

    Sums stay on the device until the figures are read. Both figures are about this rank's own gradient.
    """

    def __init__(self) -> None:
        self._active = False
        self._sums: dict[str, torch.Tensor] = {}
        self._last: dict[str, torch.Tensor] = {}

    def begin(self, compressed_steps: int) -> None:
        self._active = compressed_steps % SAMPLE_EVERY in (0, 1)  # both sides of an alternating pair

    def at_gradient(self, unit: Unit) -> None:
        self._add("gradient", unit.matrices())

    def at_factor(self, unit: Unit, side: str) -> None:
        self._add("captured", [getattr(run, side) for run in unit.runs])

    def at_residual(self, unit: Unit) -> None:
        self._add("residual", unit.errors())

    def done(self) -> None:
        if self._active:
            self._last, self._sums, self._active = self._sums, {}, False

    def figures(self) -> dict[str, float]:
        if "gradient" not in self._last:
            return {}
        whole = float(self._last["gradient"]) or 1.0
        figures = {"captured_energy": float(self._last["captured"]) / whole}
        if "residual" in self._last:
            figures["residual_ratio"] = (float(self._last["residual"]) / whole) ** 0.5
        return figures

    def _add(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if self._active and tensors:
            square = foreach.norms(tensors).square().sum()
            self._sums[what] = self._sums[what] + square if what in self._sums else square

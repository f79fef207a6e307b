"""The loss scale, for hooks that keep memories in unscaled gradient units."""

from __future__ import annotations

import torch

from ..upstream import seams
from . import compatibility


class LossScale:
    """The scale of the GradScaler that was given, or of the only one in the process; searched for at the first call."""

    def __init__(self, grad_scaler: torch.amp.GradScaler | None):
        self._grad_scaler = grad_scaler
        self._known = grad_scaler is not None

    def __call__(self, device: torch.device) -> torch.Tensor | None:
        """The current scale as a tensor on the device, or None without a GradScaler."""
        if not self._known:
            self._known = True
            scalers = seams.live_grad_scalers()
            if len(scalers) > 1:
                raise compatibility.ambiguous_scaler(len(scalers))
            self._grad_scaler = scalers[0] if scalers else None
        if self._grad_scaler is None:
            return None
        return self._grad_scaler.scale(torch.ones((), device=device))

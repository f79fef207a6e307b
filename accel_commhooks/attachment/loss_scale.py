"""The loss scale, for hooks that keep memories in unscaled gradient units."""

from __future__ import annotations

import torch

from ..comm.collectives import Communicator
from ..upstream import patches


class LossScale:
    """The scale of the GradScaler whose scaled loss the backward under way started from, or of the one that was given."""

    def __init__(self, grad_scaler: torch.amp.GradScaler | None):
        self._given = grad_scaler
        self._watch = patches.grad_scaler_watch()
        self._used: list[torch.amp.GradScaler] = []

    def __call__(self, device: torch.device) -> torch.Tensor | None:
        """The current scale as a tensor on the device, or None without a GradScaler."""
        scaler = self._scaler()
        if scaler is None or not scaler.is_enabled():
            return None
        return scaler.scale(torch.ones((), device=device))

    def _scaler(self) -> torch.amp.GradScaler | None:
        return self._given if self._given is not None else self._watch.scaling

    def note(self) -> None:
        """A backward begins."""
        scaler = self._scaler()
        if scaler is not None and not any(scaler is used for used in self._used):
            self._used.append(scaler)

    def equalise(self, comm: Communicator) -> None:
        """Give all ranks the same scale. Every rank calls it.

        While ranks step apart, only one of them may overflow and lower its scale. DDP adds up gradients as they are, so
        they must be scaled alike when it reduces again.
        """
        if not self._used:
            return
        everyones = comm.gather_objects([scaler.state_dict() for scaler in self._used])
        for scaler, states in zip(self._used, zip(*everyones, strict=True), strict=True):
            lowest = min(states, key=lambda state: state.get("scale", 0.0))
            if lowest != scaler.state_dict():
                scaler.load_state_dict(lowest)

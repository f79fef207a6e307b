"""One optimizer step on owned parts.

For the time of ``optimizer.step()`` the user's own optimizer is handed parameters that are views of the owned parts. Its
state therefore has 1/W of the size, and groups, schedules and options are its own. Outside of a step the optimizer looks as
it always did.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...upstream import foreach
from .shards import Shards

GradientOf = Callable[[torch.Tensor], "torch.Tensor | None"]
"""The gradient to step with, of a parameter; None for a parameter that is not stepped."""


class ShardedStep:
    """Swaps an optimizer's parameters for the owned parts, and back."""

    def __init__(self, shards: Shards):
        self._shards = shards
        self._optimizer: torch.optim.Optimizer | None = None
        self._swapped: list[tuple[dict, list[torch.Tensor]]] = []

    def recover(self) -> None:
        """After a step that raised an error: give the optimizer its own parameters back.

        If its gradients were cleared meanwhile, those of the parts were.
        """
        if self._optimizer is None:
            return
        ours = [p for _, parameters in self._swapped for p in parameters if p in self._shards and p.grad is not None]
        parts = [part for group, _ in self._swapped for part in group["params"] if part not in self._shards]
        if parts and all(part.grad is None for part in parts):
            for parameter in ours:
                parameter.grad = None
        elif parts and not any(part.grad is not None and bool(part.grad.any()) for part in parts):
            for parameter in ours:
                parameter.grad.zero_()  # type: ignore[union-attr]
        self.end()

    def begin(
        self, optimizer: torch.optim.Optimizer, gradient_of: GradientOf, *, keep_strangers: bool
    ) -> list[torch.Tensor]:
        """Hand the optimizer the owned parts; returns the parameters that it steps.

        ``keep_strangers`` leaves parameters that are not the model's where they are, to be stepped as well.
        """
        self._optimizer = optimizer
        self._swapped = [(group, group["params"]) for group in optimizer.param_groups]
        found = {
            parameter: gradient
            for _, parameters in self._swapped
            for parameter in parameters
            if parameter in self._shards and (gradient := gradient_of(parameter)) is not None
        }
        shards = dict(zip(found, self._shards.refresh(list(found)), strict=True))
        types = [shard.dtype for shard in shards.values()]
        for shard, gradient in zip(shards.values(), foreach.converted(list(found.values()), types), strict=True):
            shard.grad = gradient
        for group, parameters in self._swapped:
            parts = []
            for parameter in parameters:
                part = shards.get(parameter)
                if part is None:
                    if keep_strangers and parameter not in self._shards:
                        parts.append(parameter)
                    continue
                if parameter in optimizer.state:
                    optimizer.state[part] = optimizer.state.pop(parameter)
                if part.numel():
                    parts.append(part)
            group["params"] = parts
        return list(found)

    def end(self) -> None:
        """Give the optimizer its own parameters back."""
        assert self._optimizer is not None
        state = self._optimizer.state
        for group, parameters in self._swapped:
            group["params"] = parameters
            for parameter in parameters:
                shard = self._shards.get(parameter)
                if shard is not None:
                    shard.grad = None
                    if shard in state:
                        state[parameter] = state.pop(shard)
        self._optimizer, self._swapped = None, []

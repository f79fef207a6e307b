"""Which optimizers are the model's, and when they step.

An unchanged script does not hand over its optimizers, so every optimizer's step is watched, and those that hold some of the
model's parameters are recognised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,  # noqa: TID251 - attachment may watch steps
    register_optimizer_step_pre_hook,  # noqa: TID251 - as above
)

from ..upstream import seams
from ..upstream.callbacks import weak_method

StepHook = Callable[[torch.optim.Optimizer], None]


class ModelOptimizers:
    """The optimizers that hold some of a model's parameters, in the order in which they were found."""

    def __init__(self, parameters: Iterable[torch.Tensor], found: Callable[[list[torch.optim.Optimizer]], None]):
        self._parameters = {id(parameter) for parameter in parameters}
        self._found = found
        self._ours: list[torch.optim.Optimizer] = []
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._ours)

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Set the model's optimizers, and report them to the hook."""
        self._ours = optimizers
        self._found(optimizers)

    def search(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find them among all live optimizers, before one of them steps."""
        self.bind(seams.optimizers_of(parameters))

    def recognise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is one of the model's; if it was not known yet, it is bound."""
        if any(optimizer is known for known in self._ours):
            return True
        if optimizer in self._strangers:
            return False
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self.bind([*self._ours, optimizer])
            return True
        self._strangers.add(optimizer)
        return False


def watch_steps(before: StepHook, after: StepHook) -> list[Any]:
    """Call two methods of one object before and after every optimizer's step.

    The hooks are global: they must neither keep the object alive nor outlive it.
    """
    weak_before, weak_after = weak_method(before), weak_method(after)
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: weak_before(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: weak_after(optimizer)),
    ]
    for handle in handles:
        weakref.finalize(before.__self__, handle.remove)  # type: ignore[attr-defined]
    return handles


def before_every_step(action: StepHook) -> Any:
    """Call a function before every optimizer's step, until the handle returned is removed."""
    return register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: action(optimizer))


def innermost_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside AcceleratedOptimizer and the like."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer

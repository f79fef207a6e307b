"""Which optimizers are the model's, and when they step.

An unchanged script does not hand over its optimizers, so every optimizer's step is watched, and those that hold some of the
model's parameters are recognised.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,  # noqa: TID251 - attachment may watch steps
    register_optimizer_step_pre_hook,  # noqa: TID251 - as above
)

from ..upstream.callbacks import WeakList
from ..upstream.live_objects import optimizers_of

BeforeStep = Callable[[torch.optim.Optimizer, Any, Any], Any]
"""Of an optimizer, its arguments and its keywords; returns None, or others to call it with."""


class ModelOptimizers:
    """The optimizers that hold some of a model's parameters, in the order in which the model has those."""

    def __init__(self, parameters: Iterable[torch.Tensor], found: Callable[[list[torch.optim.Optimizer]], None]):
        self._place = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._found = found
        self._ours = WeakList()
        """A script may replace its optimizer."""
        self._strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers of others, and how many groups they had when they were looked at."""

    def __len__(self) -> int:
        return len(self._ours)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._ours)

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Set the model's optimizers, and report them to the hook, in the same order on every rank."""
        ordered = sorted(optimizers, key=self._places)
        self._ours = WeakList(ordered)
        self._found(ordered)

    def _places(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Where in the model an optimizer's parameters are."""
        return sorted(
            self._place[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in self._place
        )

    def search(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find them among all live optimizers, before one of them steps."""
        self.bind(optimizers_of(parameters))

    def recognise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is one of the model's; if it was not known yet, it is bound."""
        if any(optimizer is known for known in self._ours):
            return True
        if self._strangers.get(optimizer) == len(optimizer.param_groups):
            return False
        if any(id(p) in self._place for group in optimizer.param_groups for p in group["params"]):
            self.bind([*self._ours, optimizer])
            return True
        self._strangers[optimizer] = len(optimizer.param_groups)
        return False

    def all_stepped(self, stepped: list[torch.optim.Optimizer]) -> bool:
        """Whether every trainable parameter of the model that some optimizer holds is held by one of these."""
        return len(self) == 1 or self._trainable(self._ours) <= self._trainable(stepped)

    def _trainable(self, optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
        """The places in the model of what optimizers train."""
        return {
            self._place[id(p)]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) in self._place
        }


class StepWatch:
    """Tells its listeners of every optimizer's step: ``before_step(optimizer, args, kwargs)``, ``after_step(optimizer)``.

    One pair of hooks for all of them, never removed: torch iterates over its hooks while an optimizer steps, and the garbage
    collector may take a listener away meanwhile.
    """

    def __init__(self) -> None:
        self.listeners = WeakList()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for listener in self.listeners:
            answer = listener.before_step(optimizer, args, kwargs)
            if answer is not None:
                changed = args, kwargs = answer
        return changed

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for listener in reversed(
            list(self.listeners)
        ):  # they are nested: what the last one changed is changed back first
            listener.after_step(optimizer)


step_watch = functools.cache(StepWatch)
"""The watch of this process, started at the first call."""


def before_every_step(action: BeforeStep) -> Any:
    """Call a function before every optimizer's step, until the handle returned is removed."""
    return register_optimizer_step_pre_hook(action)


def after_closure(
    args: Any,
    kwargs: Any,
    action: Callable[[], object],
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Any:
    """The arguments of ``optimizer.step(closure)`` with a closure that runs ``action`` at its end; None without a closure.

    The closure itself runs inside ``around()``.
    """
    closure = kwargs["closure"] if "closure" in kwargs else (args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def closure_then_action() -> Any:
        with around():
            loss = closure()
        action()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_action}
    return (args[0], closure_then_action, *args[2:]), kwargs


def innermost_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside AcceleratedOptimizer and the like."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer

"""Objects that an unchanged script does not hand over, found by asking the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def live_objects(kind: type[T]) -> list[T]:
    """Every live instance of a class.

    An unchanged script hands over neither its optimizer nor its GradScaler nor its Accelerator. Asking the garbage
    collector takes some tens of milliseconds and is done at setup only. An object refers to its class, so the collector
    finds instances without looking at each object's class here.
    """
    kinds: set[type] = set()
    found = [kind]
    while found:
        kinds.add(subclass := found.pop())
        found += [each for each in type.__subclasses__(subclass) if each not in kinds]
    return [o for o in gc.get_referrers(*kinds) if type(o) in kinds]


def optimizers_of(parameters: Iterable[torch.Tensor], *, collect: bool = True) -> list[torch.optim.Optimizer]:
    """The live torch optimizers that hold some of these parameters; wrappers around an optimizer do not count.

    Without ``collect`` one that nobody uses any more may be found, on some ranks and not on others.
    """
    wanted = {id(parameter) for parameter in parameters}
    found = []
    if collect:
        gc.collect()
    for optimizer in live_objects(torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer) or not hasattr(optimizer, "param_groups"):
            continue
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
            found.append(optimizer)
    return found

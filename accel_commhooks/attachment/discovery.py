"""Finding DDP models that a script builds by itself.

torch tells when a module is given a child, and a DDP wrapper is given its ``module`` while it is built.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook  # noqa: TID251 - DDP is found here
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..upstream.compiling import eager, without_compile


class DDPWatch:
    """Remembers the DDP wrappers built since it was started, in the order in which they were built."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[DistributedDataParallel]] = []
        self._handle = register_module_module_registration_hook(self._registered)

    def _registered(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel) and name == "module" and child is not None:
            self._seen = [reference for reference in self._seen if reference() is not None]
            self._seen.append(weakref.ref(parent))
            self.found(parent, child)

    def found(self, ddp: torch.nn.Module, module: torch.nn.Module) -> None:
        """A wrapper around ``module`` is being built; it is not finished yet."""

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        """The newest first: if a model has several wrappers, it is the newest one's."""
        for reference in reversed(self._seen):
            if (ddp := reference()) is not None:
                yield ddp

    def wrapper_of(self, model: torch.nn.Module) -> DistributedDataParallel | None:
        """The newest wrapper around a model."""
        return next((ddp for ddp in self if ddp.module is model or without_compile(ddp.module) is model), None)

    def wrapper_around_or_inside(self, model: torch.nn.Module) -> DistributedDataParallel | None:
        """The newest wrapper that is this model, is inside it, or is around it."""
        return next((ddp for ddp in self if ddp in model.modules() or ddp.module is model), None)

    def stop(self) -> None:
        self._handle.remove()


def before_first_forward(ddp: torch.nn.Module, action: Callable[[torch.nn.Module, Any], None]) -> None:
    """Run ``action(ddp, args)`` before the wrapper's first forward, in time for its first backward."""

    def first_forward(module: torch.nn.Module, args: Any) -> None:
        handle.remove()
        action(ddp, args)

    handle = ddp.register_forward_pre_hook(eager(first_forward), prepend=True)

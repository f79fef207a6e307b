"""Callbacks that do not keep their object alive: DDP and tensors hold them where the garbage collector cannot see."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


def weak_method(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A function that calls the method for as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(tensor: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(tensor)

    return call

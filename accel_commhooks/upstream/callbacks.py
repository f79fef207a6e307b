"""Callbacks for torch: DDP and tensors hold them where the garbage collector cannot see, so they must be weak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call

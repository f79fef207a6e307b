"""Callbacks for torch: DDP and tensors hold them where the garbage collector cannot see, so they must be weak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Listeners:
    """Objects to be told of something, as long as they live, in the order in which they were added.

    The order is the same on every rank, as what they do may be collective. A WeakSet has another one on every rank.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, listener: Any) -> None:
        key = id(listener)
        self._references[key] = weakref.ref(listener, lambda _: self._references.pop(key, None))

    def discard(self, listener: Any) -> None:
        self._references.pop(id(listener), None)

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references.values()):
            if (listener := reference()) is not None:
                yield listener


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call

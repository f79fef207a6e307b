"""Callbacks for torch: DDP and tensors hold them where the garbage collector cannot see, so they must be weak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class WeakList:
    """Objects in the order in which they were added, each as long as it lives.

    A WeakSet has another order on every rank, and what is done with its members may be collective.
    """

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        for member in members:
            self.add(member)

    def add(self, member: Any) -> None:
        key = id(member)
        self._references[key] = weakref.ref(member, lambda _: self._references.pop(key, None))

    def discard(self, member: Any) -> None:
        self._references.pop(id(member), None)

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references.values()):
            if (member := reference()) is not None:
                yield member


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call

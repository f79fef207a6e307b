"""Defects to plant: the soak must find each of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from accel_commhooks.attachment.consistency import Consistency
from accel_commhooks.hooks.powersgd.stages import LowRankHook

from .trainee import Trainee


@contextlib.contextmanager
def _after_every_step(action: Callable[[Trainee], object]) -> Iterator[None]:
    real = Trainee.step

    def step(trainee, spec):
        real(trainee, spec)
        action(trainee)

    with patch.object(Trainee, "step", step):
        yield


@contextlib.contextmanager
def _thread() -> Iterator[None]:
    over = threading.Event()
    with _after_every_step(lambda _: threading.Thread(target=over.wait, daemon=True).start()):
        yield
    over.set()


@contextlib.contextmanager
def _descriptor() -> Iterator[None]:
    opened: list[int] = []
    with _after_every_step(lambda _: opened.append(os.open(os.devnull, os.O_RDONLY))):
        yield
    for descriptor in opened:
        os.close(descriptor)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Outside of what the garbage collector sees, so that only the memory tells."""
    kept: list[bytearray] = []
    with _after_every_step(lambda _: kept.append(bytearray(os.urandom(2**20)))):
        yield


@contextlib.contextmanager
def _tensors() -> Iterator[None]:
    kept: list[torch.Tensor] = []
    with _after_every_step(lambda _: kept.append(torch.ones(1))):
        yield


def _tensors_of_the_hook() -> contextlib.AbstractContextManager:
    """As a queue that is never emptied; it goes with the hook."""

    def keep(trainee: Trainee) -> None:
        trainee.handle.hook.__dict__.setdefault("kept", []).append(torch.ones(1))

    return _after_every_step(keep)


@contextlib.contextmanager
def _one_bit() -> Iterator[None]:
    """Where the package does not look itself."""

    def flip(trainee: Trainee) -> None:
        if trainee.rank == 1:
            trainee.model.norm.weight.data.view(torch.int32)[3] ^= 1

    nothing = {"tick": lambda self, reductions=1: None, "check_now": lambda self: None}
    with _after_every_step(flip), patch.multiple(Consistency, **nothing):
        yield


def _not_a_number() -> contextlib.AbstractContextManager:
    def spoil(trainee: Trainee) -> None:
        trainee.model.norm.bias.data[0] = torch.nan

    return _after_every_step(spoil)


def _state_is_not_loaded() -> contextlib.AbstractContextManager:
    return patch.object(LowRankHook, "load_state_dict", lambda hook, state: None)


PLANTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager], str]] = {
    "a thread is left at every step": (_thread, "threads grew"),
    "a descriptor is left open at every step": (_descriptor, "descriptors grew"),
    "a megabyte is lost at every step": (_memory, "memory_mb grew"),
    "a tensor is lost at every step": (_tensors, "tensors grew"),
    "a hook keeps a tensor of every step": (_tensors_of_the_hook, "under one attachment"),
    "a bit of one rank's weights changes": (_one_bit, "ranks differ"),
    "weights become NaN": (_not_a_number, "the loss is nan"),
    "a hook's state is not loaded": (_state_is_not_loaded, "came out different"),
}
"""(how it is planted, what the soak must say) by title."""

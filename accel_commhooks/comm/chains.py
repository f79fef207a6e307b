"""Collectives that follow from one another: each is issued when the one before has arrived.

A chain is written as a generator, which issues a collective, yields, waits for it, issues the next, and so on.

On an accelerator a chain runs to its end at once, on a stream of its own: that stream waits for each collective, and the host
for none. On a CPU, where the host itself must wait, chains go one step further before each bucket of a backward, when what they
wait for has probably arrived, and all of them go on when one is waited for. A patient chain, which travels in the background,
goes on only when it is told to. All of this happens at the same place of the program on every rank, so the order of collectives
depends on no timing.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from ..upstream.devices import beside, wait_for

Steps = Generator[None, None, None]


class Chains:
    """The chains of one communicator that have not reached their end."""

    def __init__(self) -> None:
        self._under_way: list[Chain] = []

    def begin(self, steps: Steps, tensor: torch.Tensor, *, patient: bool = False) -> Chain:
        """Start a chain whose result is in ``tensor``."""
        chain = Chain(steps, tensor, None if patient else self)
        if tensor.device.type != "cpu":
            chain.run_beside()
            return chain
        chain.go_on()
        if not patient:
            self._under_way.append(chain)
        return chain

    def forget(self) -> None:
        """Chains of a backward that failed will not be waited for."""
        self._under_way = []

    def go_on(self) -> None:
        """One step with each chain."""
        for chain in self._under_way:
            chain.go_on()
        self._under_way = [chain for chain in self._under_way if not chain.ended]


class Chain:
    """A chain under way. ``wait()`` returns its result and may be called again."""

    def __init__(self, steps: Steps, tensor: torch.Tensor, together: Chains | None):
        self._steps, self._tensor, self._together = steps, tensor, together
        self._end: torch.Event | None = None
        self.ended = False

    def go_on(self) -> None:
        """Wait for the collective under way, and issue the next."""
        if self.ended:
            return
        self.ended = True  # unless it comes to another collective: a chain that fails is at its end
        for _ in self._steps:
            self.ended = False
            return

    def run_beside(self) -> None:
        """To the end, on a stream beside the current one."""
        with beside(self._tensor.device) as self._end:
            for _ in self._steps:
                pass
        self.ended = True

    def wait(self) -> torch.Tensor:
        while not self.ended:
            (self._together or self).go_on()
        if self._end is not None:
            wait_for(self._end, self._tensor.device)
            self._end = None
        return self._tensor

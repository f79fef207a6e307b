"""Communication under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from .survivors import Group, lost_ranks_named
from .traffic import Traffic


class PendingResult(Protocol):
    """Communication under way whose result can be waited for."""

    def go_on(self) -> None:
        """Wait for what is under way, and issue what follows from it."""
        ...

    def wait(self) -> object:
        """Until the result is there."""
        ...


class PendingCollective:
    """A collective under way. Keeps its tensors alive; ``wait()`` returns the result and may be called again."""

    def __init__(
        self,
        result: torch.Tensor,
        works: Sequence[dist.Work],
        group: Group,
        traffic: Traffic,
        finish: Callable[[], object] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ):
        self._result, self._works, self._group, self._traffic = result, works, group, traffic
        self._finish, self._keep = finish, keep

    def go_on(self) -> None:
        if self._works:
            start = time.perf_counter()
            with lost_ranks_named(self._group):
                for work in self._works:
                    work.wait()
            self._traffic.waited += time.perf_counter() - start
            self._works = ()

    def wait(self) -> torch.Tensor:
        self.go_on()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._keep = ()
        return self._result

"""Parameters on their way: gathered from their owners in the background, and waited for when they are read.

A read may be the next forward, an evaluation, ``state_dict()`` or a loop over ``parameters()``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from ...upstream import seams
from ...upstream.devices import on_this_stream
from .sharding import GATHER_BYTES
from .shards import Shards


class ParameterGather:
    """The gathers of one model's parameters."""

    def __init__(self, shards: Shards, module: torch.nn.Module, wire_dtype: torch.dtype | None):
        self._shards, self._ownership = shards, shards.ownership
        self._module, self._wire_dtype = module, wire_dtype
        self._arriving: dict[int, Callable[[], None]] = {}
        """What finishes a parameter's gather, by the parameter's id."""
        self._end_guard: Callable[[], None] | None = None
        self._suspended = False
        self.waited = 0.0
        """Seconds spent waiting for gathers since this was last set to zero."""

    def start(self, parameters: list[torch.Tensor]) -> None:
        """Start gathering, in the model's order, in pieces small enough for the first layers to start early."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = 0
        for index, parameter in enumerate(parameters):
            flat = parameter.detach().view(-1)
            pairs.append((parameter, flat))
            size += flat.numel() * flat.element_size()
            following = parameters[index + 1] if index + 1 < len(parameters) else None
            if size >= GATHER_BYTES or following is None or following.dtype != parameter.dtype:
                self._start_piece(pairs)
                pairs, size = [], 0
        if self._arriving and self._end_guard is None:
            # The module holds this gather until all parameters are whole, even if the hook is gone by then.
            self._end_guard = seams.guard_parameters(self._module, self._finish)

    def _start_piece(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        own = [self._shards.get(parameter).detach() for parameter, _ in pairs]  # type: ignore[union-attr]
        gathered = self._ownership.gather(pairs, own, dtype=self._wire_dtype)

        def write() -> None:
            gathered()
            self._shards.delivered([parameter for parameter, _ in pairs])

        finish = on_this_stream(write, pairs[0][1].device)  # an evaluation may read on a stream of its own
        members = [id(parameter) for parameter, _ in pairs]

        def finish_all() -> None:
            start = time.perf_counter()
            finish()
            self.waited += time.perf_counter() - start
            for member in members:
                self._arriving.pop(member, None)

        self._arriving.update(dict.fromkeys(members, finish_all))

    @contextlib.contextmanager
    def reading_suspended(self) -> Iterator[None]:
        """Within it parameters are iterated over but not read, so nothing is waited for."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def _finish(self, parameter: torch.Tensor) -> None:
        arriving = self._arriving.get(id(parameter))
        if arriving is not None and not self._suspended:
            with torch.no_grad():
                arriving()

    def finish_all(self) -> None:
        """Wait until every parameter is whole."""
        for arriving in list(dict.fromkeys(self._arriving.values())):
            with torch.no_grad():
                arriving()
        if self._end_guard is not None:
            self._end_guard()
            self._end_guard = None

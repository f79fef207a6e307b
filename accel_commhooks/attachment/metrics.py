"""Communication figures for the logs: per-step averages over a window of steps.

Counting is a few additions a step; nothing here synchronises with a device until the figures are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .handle import Attachment

MB = 1e6
PREFIX = "comm_"


class MetricsWindow:
    """Averages over the steps since the last read. Reading twice without a step in between repeats the figures."""

    def __init__(self, attachment: Attachment):
        self._attachment = attachment
        self._last: dict[str, float] = {}
        self._start: tuple[float, ...] = ()
        self._mark()

    def count_step(self) -> None:
        self._steps += 1

    def read(self) -> dict[str, float]:
        if self._steps:
            self._last = self._figures()
            self._mark()
        return dict(self._last)

    @contextlib.contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """What is sent within it is no part of a step: it belongs to a save or an evaluation."""
        before = self._counters()
        yield
        added = [now - then for now, then in zip(self._counters(), before, strict=True)]
        self._start = tuple(start + more for start, more in zip(self._start, added, strict=True))

    def _counters(self) -> tuple[float, float, float]:
        traffic = self._attachment.comm.traffic
        return traffic.scope("within"), traffic.scope("between"), traffic.waited

    def _mark(self) -> None:
        self._steps = 0
        self._start = self._counters()

    def _figures(self) -> dict[str, float]:
        attachment = self._attachment
        traffic = attachment.comm.traffic
        gradient_bytes = sum(p.numel() * p.element_size() for p in attachment.parameters if p.requires_grad)
        plain = traffic.of_plain_ddp(gradient_bytes)
        plain_total = plain["within"] + plain["between"]
        figures = {"plain_ddp_mb": plain_total / MB}
        if attachment.hook.counted:
            within, between, waited = (
                (now - then) / self._steps for now, then in zip(self._counters(), self._start, strict=True)
            )
            figures |= {"mb_within_node": within / MB, "mb_between_nodes": between / MB, "wait_s": waited}
            if within + between > 0:
                figures["compression"] = plain_total / (within + between)
        figures |= attachment.hook.metrics()
        return {PREFIX + name: value for name, value in figures.items()}

"""Keeping DDP from communicating, and making it whole again when it is to reduce once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..upstream import seams

if TYPE_CHECKING:
    from .handle import Attachment


class Muting:
    """DDP is muted for single forwards: no buffer broadcasts, and no gradients or bitmaps in their backwards."""

    def __init__(self, attachment: Attachment):
        self._attachment = attachment
        self._before: tuple[bool, bool] | None = None
        self._resume_static_graph: Callable[[], None] = lambda: None
        self._ever = False
        """Whether DDP slept through a backward."""

    @property
    def _ddp(self) -> Any:
        return self._attachment.ddp

    def begin(self, *, only_buffers: bool) -> None:
        """For this forward, and for its backward unless ``only_buffers``."""
        self.end()  # a forward that was interrupted has not ended
        ddp = self._ddp
        self._before = (ddp.require_backward_grad_sync and not only_buffers, ddp.broadcast_buffers)
        ddp.broadcast_buffers = False
        if not only_buffers:
            self._ever = True
            ddp.require_backward_grad_sync = False
            self._resume_static_graph = seams.postpone_static_graph(ddp)

    def end(self) -> bool:
        """The forward is over; returns whether its backward is not reduced."""
        if self._before is None:
            return False
        unreduced, self._ddp.broadcast_buffers = self._before
        self._before = None
        if unreduced:
            self._ddp.require_backward_grad_sync = True
            self._resume_static_graph()
        return unreduced

    def reduce_again(self) -> None:
        """DDP is to reduce again: without a hook, or with one that has gone back to an earlier step. Every rank calls it."""
        if self._ever:
            self.settle()

    def settle(self) -> None:
        """Let DDP forget forwards that it prepared and did not reduce, and backwards that it slept through.

        Every rank calls it, where it begins to be muted and where that ends.
        """
        ddp = self._ddp
        if ddp.find_unused_parameters and not ddp.static_graph:
            with self._attachment.slot.silent():
                seams.settle_reducer(ddp, self._attachment.parameters)

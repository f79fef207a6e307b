"""The step: turns what DDP and the optimizers do into the lifecycle of hooks/base.py.

A :class:`StepClock` watches DDP's forwards, the ends of backwards that DDP does not reduce, and the optimizers' steps, and
decides when a step is over and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..hooks.base import CommHook
from ..upstream import seams
from ..upstream.callbacks import weak_method
from .optimizers import ModelOptimizers, watch_steps

if TYPE_CHECKING:
    from .handle import Attachment


class StepClock:
    """The watch over one attachment's model.

    DDP's forward hooks hold the clock, and the clock holds the attachment, so an attachment lives as long as its model.
    """

    def __init__(self, attachment: Attachment):
        self._attachment = attachment
        self._ddp, self._hook = attachment.ddp, attachment.hook
        self._parameters = attachment.parameters
        self.optimizers = ModelOptimizers(self._parameters, self._hook.bind)
        self._awaiting_step = False
        self._unreduced_backward = False
        self._asleep: tuple[bool, bool] | None = None
        self._consensus_until_forward = False
        self._backward_watch: Any = None
        self._handles = [
            self._ddp.register_forward_pre_hook(self.before_forward, prepend=True),
            self._ddp.register_forward_hook(self._after_forward, always_call=True),
            *watch_steps(self.before_step, self.after_step),
        ]
        if type(self._hook).reading_suspended is not CommHook.reading_suspended:
            # Trainer calls model.zero_grad(), which iterates over all parameters and reads none of them.
            self._ddp.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def stop(self) -> None:
        """Remove every hook that was set."""
        self.close_consensus()
        self._wake()
        for handle in self._handles:
            handle.remove()
        self._ddp.__dict__.pop("zero_grad", None)
        if self._backward_watch is not None:
            self._backward_watch.remove()

    # Forward and backward.

    def before_forward(self, ddp: torch.nn.Module, args: Any) -> None:
        """DDP's forward is about to run."""
        if not torch.is_grad_enabled():
            self._sleep(only_buffers=True)
            return
        self.close_consensus()
        self._unreduced_backward = False
        if self._awaiting_step and all(p.grad is None for p in self._parameters):
            self._finish_step()  # gradients were cleared without a step: a GradScaler skipped it
        if self._hook.needs_optimizer and not self.optimizers:
            self.optimizers.search(self._parameters)
        self._hook.before_forward()
        if not self._ddp.require_backward_grad_sync:
            self._sleep(only_buffers=True)
            return
        self._awaiting_step = True
        self._sleep(only_buffers=False)

    def _after_forward(self, ddp: torch.nn.Module, args: Any, output: Any) -> None:
        self._wake()

    def _sleep(self, *, only_buffers: bool) -> None:
        """Keep DDP from communicating in this forward (buffers) and in its backward (gradients, bitmap)."""
        if self._hook.reduces_this_step():
            return
        ddp = self._ddp
        self._asleep = (ddp.require_backward_grad_sync, ddp.broadcast_buffers)
        ddp.broadcast_buffers = False
        if not only_buffers:
            ddp.require_backward_grad_sync = False
            self._unreduced_backward = True
            self._watch_backward()

    def _wake(self) -> None:
        if self._asleep is not None:
            self._ddp.require_backward_grad_sync, self._ddp.broadcast_buffers = self._asleep
            self._asleep = None

    def _watch_backward(self) -> None:
        """Call the hook at the end of a backward that DDP does not reduce; skipped if the hook does not implement it."""
        if type(self._hook).after_unreduced_backward is CommHook.after_unreduced_backward or self._backward_watch:
            return

        self._backward_watch = torch.autograd.graph.register_multi_grad_hook(
            [p for p in self._parameters if p.requires_grad], weak_method(self._gradient_arrived), mode="any"
        )

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        """A gradient arrived, perhaps the first one of a backward that DDP does not reduce."""
        if self._unreduced_backward:
            self._unreduced_backward = False
            seams.at_end_of_backward(lambda: self._hook.after_unreduced_backward(list(self._parameters)))

    # The optimizers' steps.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizers.recognise(optimizer):
            self._hook.before_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizers.recognise(optimizer):
            self._hook.after_step(optimizer)
            self.step_attempted()

    def step_attempted(self) -> None:
        """A step is over, although this rank's optimizer may not have run (GradScaler)."""
        if self._awaiting_step:
            self._finish_step()

    def _finish_step(self) -> None:
        self._awaiting_step = False
        self._hook.step_done()
        self._attachment.count_step()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        with self._hook.reading_suspended():
            type(self._ddp).zero_grad(self._ddp, set_to_none)

    # The consensus for a save, whose end is not announced.

    def open_consensus(self) -> None:
        if not self._consensus_until_forward:
            self._hook.begin_consensus()
            self._consensus_until_forward = True

    def close_consensus(self) -> None:
        if self._consensus_until_forward:
            self._consensus_until_forward = False
            self._hook.end_consensus()

"""What a step is: turns what DDP, autograd, optimizers and GradScalers do into the lifecycle of hooks/base.py.

The rules of the :class:`StepClock`, which hold for any script that works with plain DDP:

1. A step begins with a gradient: DDP hands over a bucket, or a backward that DDP does not reduce reaches the outputs of
   DDP's forward. Forwards change nothing, however many there are.
2. A backward ends when the outermost one does. Reentrant checkpointing runs backwards inside it, so the end is watched
   from the outputs of DDP's forward, which are outside of those.
3. A step ends when every trainable parameter that an optimizer holds has been stepped, or when ``GradScaler.step`` has
   returned without stepping: both are the same line of the script on every rank. At the latest the next backward ends it;
   then weights are in use and cannot be averaged before the next optimizer's step.
4. Gradients that are cleared without a step were discarded: no step is counted.
5. The backward in a closure, ``optimizer.step(closure)``, belongs to that step: the hook's ``before_step`` comes after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm.survivors import lost_ranks_named
from ..hooks.base import CommHook
from ..upstream import patches, seams
from ..upstream.callbacks import weak_method
from . import compatibility
from .backward import BackwardWatch
from .muting import Muting
from .optimizers import ModelOptimizers, after_closure, innermost_optimizer, step_watch

if TYPE_CHECKING:
    from .handle import Attachment


@dataclass
class StepUnderWay:
    """A call of ``optimizer.step()`` that has not returned: optimizers call each other's, or their base class's."""

    optimizer: torch.optim.Optimizer
    nested: bool
    """Within a step of the same optimizer."""
    counted: bool = False
    """Whether a step was counted meanwhile."""


class StepClock:
    """The watch over one attachment's model.

    DDP's forward hooks hold the clock, and the clock holds the attachment, so an attachment lives as long as its model.
    Neither holds DDP.
    """

    def __init__(self, attachment: Attachment):
        self._attachment = attachment
        self._hook = attachment.hook
        self._parameters = attachment.parameters
        self.optimizers = ModelOptimizers(self._parameters, weak_method(self._bind))
        self._scalers = patches.grad_scaler_watch()
        self._backward = BackwardWatch(self._parameters, self._backward_begins, self._unreduced_backward_ended)
        self._open = False
        """Whether gradients have arrived since the last step."""
        self._backward_seen = False
        """The same, even if DDP is not to reduce them (no_sync)."""
        self._reduced = False
        """Whether DDP has reduced some."""
        self._under_way: list[StepUnderWay] = []
        self._closures = 0
        self._stepped: list[torch.optim.Optimizer] = []
        """Those of the model's optimizers that have stepped since then."""
        self._ran_in_scaler = False
        self._searched = False
        self.muting = Muting(attachment)
        self._begins_to_mute = False
        self._consensus_until_forward = False
        compiling = attachment.compile_watch
        forward_hooks = [
            self._ddp.register_forward_pre_hook(compiling.eager(self.before_forward), prepend=True),
            self._ddp.register_forward_hook(compiling.eager(self._after_forward), always_call=True),
        ]
        self._handles = forward_hooks
        self._watches = [step_watch().listeners, self._scalers.listeners, patches.load_watch().listeners]
        for listeners in self._watches:
            listeners.add(self)
        self._end_plain_copies = seams.keep_copies_plain(self._ddp, forward_hooks)
        if type(self._hook).reading_suspended is not CommHook.reading_suspended:
            # Trainer calls model.zero_grad(), which iterates over all parameters and reads none of them.
            self._ddp.zero_grad = self._zero_grad

    def stop(self) -> None:
        """Remove everything that was set; the model may be gone already."""
        for handle in self._handles:
            handle.remove()
        for listeners in self._watches:
            listeners.discard(self)
        self._end_plain_copies()
        self._backward.stop()
        if self._attachment.has_model:
            self.muting.end()
            self._ddp.__dict__.pop("zero_grad", None)

    @property
    def _ddp(self) -> Any:
        return self._attachment.ddp

    @property
    def in_step(self) -> bool:
        """Whether gradients wait for an optimizer."""
        return self._open and any(p.grad is not None for p in self._parameters)

    # Forwards.

    def before_forward(self, ddp: torch.nn.Module, args: Any) -> None:
        """DDP's forward is about to run."""
        self._forget_broken_backward()
        if not self._closures:
            self._under_way.clear()  # steps that raised an error
        if seams.is_joining(self._ddp):
            raise compatibility.joining(self._hook.name)
        grad = torch.is_grad_enabled()
        if grad:
            self._attachment.compare_weights()
            self.close_consensus()
            self._hook.before_forward()
            with lost_ranks_named(self._attachment.comm.everyone):
                seams.rebuild_buckets(self._ddp)
        if not self._hook.reduces_this_step():
            self.muting.begin(only_buffers=not (grad and self._ddp.require_backward_grad_sync))

    def _after_forward(self, ddp: torch.nn.Module, args: Any, output: Any) -> None:
        unreduced = self.muting.end()
        if not torch.is_grad_enabled():
            return
        self._backward.after_forward(output, unreduced=unreduced)

    # Backwards.

    def bucket_arrived(self, *, first: bool) -> None:
        """DDP hands over a bucket."""
        self._backward.bucket_arrived()
        self._open = self._reduced = True
        if first and self._hook.reduces_this_step():
            self._attachment.consistency.tick()

    def _backward_begins(self) -> None:
        self._attachment.loss_scale.note()
        if self._open:
            self._settle_previous()
        self._backward_seen = True
        if self._hook.needs_optimizer and not self.optimizers:
            self.optimizers.search(self._parameters)
        self._hook.begin_backward()

    def _unreduced_backward_ended(self) -> None:
        self._open = True
        self._hook.after_unreduced_backward(list(self._parameters))

    def _settle_previous(self) -> None:
        """What became of the gradients of the backward before this one."""
        if not self.optimizers and not self._searched:
            self._searched = True
            self.optimizers.search(self._parameters)
        if self._stepped or not self.optimizers:
            self._finish_step(weights_in_use=True)
        else:
            self._settle_discarded()

    def settle(self) -> None:
        """The hook's state is about to be saved or replaced: gradients that were cleared must not be in it."""
        if self._open and self.optimizers and not self._stepped and not self._gradients_left():
            self._settle_discarded()

    def _settle_discarded(self) -> None:
        if all(p.grad is None for p in self._parameters):
            self._hook.discard(None)
            self._open = self._backward_seen = False
        elif type(self._hook).discard is not CommHook.discard:
            self._hook.discard(self._gradients_left())

    def _gradients_left(self) -> torch.Tensor:
        """Whether some gradient is not zero, on the device."""
        left = [torch.linalg.vector_norm(p.grad, ord=float("inf")) for p in self._parameters if p.grad is not None]
        return torch.stack(left).amax() != 0 if left else torch.tensor(False)

    def _forget_broken_backward(self) -> None:
        if self._backward.forget_broken():
            self._scalers.forget()
            self._hook.abandon_backward()
            self._hook.comm.forget_chains()

    # The optimizers' steps.

    def _bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            compatibility.refuse_repeated_closures(self._hook, optimizer)
        self._hook.bind(optimizers)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer holds some of the model's parameters. If the wrapper is gone, they may be another one's."""
        return self._attachment.has_model and self.optimizers.recognise(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step; returns its arguments with the closure wrapped, if it has one."""
        if not self._is_ours(optimizer):
            return None
        self._forget_broken_backward()
        # A hook that steps inside backward may do so inside of a closure; that is another step.
        nested = not self._closures and any(step.optimizer is optimizer for step in self._under_way)
        self._under_way.append(StepUnderWay(optimizer, nested))
        if nested:
            return None
        wrapped = after_closure(args, kwargs, lambda: self._hook.before_step(optimizer), self._in_closure)
        if wrapped is None:
            self._hook.before_step(optimizer)
        return wrapped

    @contextlib.contextmanager
    def _in_closure(self) -> Iterator[None]:
        self._closures += 1
        try:
            yield
        finally:
            self._closures -= 1

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_ours(optimizer):
            return
        step = None
        while self._under_way and (step is None or step.optimizer is not optimizer):
            step = self._under_way.pop()
        if step is None or step.nested:
            return
        self._ran_in_scaler = True
        self._hook.after_step(optimizer)
        if not step.counted:
            self._attempted(optimizer)

    def before_scaler_step(self, optimizer: Any) -> None:
        """``GradScaler.step(optimizer)`` begins."""
        self._ran_in_scaler = False

    def after_scaler_step(self, optimizer: Any) -> None:
        """``GradScaler.step(optimizer)`` has returned, perhaps without a step."""
        inner = innermost_optimizer(optimizer)
        if not self._ran_in_scaler and self._is_ours(inner):
            self._attempted(inner)

    def _attempted(self, optimizer: torch.optim.Optimizer) -> None:
        if seams.current_backward() != -1:
            return  # a hook that steps inside backward; the loop's own step ends it
        # Where DDP does not reduce, a rank may have had nothing to do with the model in this step: it counts all the same.
        if self._open or self._backward_seen or not self._hook.reduces_this_step():
            self._stepped.append(optimizer)
            if self.optimizers.all_stepped(self._stepped):
                self._finish_step()
        self._hook.catch_up()
        if self._begins_to_mute:
            self._begins_to_mute = False
            self.muting.settle()

    def _finish_step(self, *, weights_in_use: bool = False) -> None:
        reduced = self._hook.reduces_this_step()
        if reduced and self._backward_seen and not self._reduced:
            self._attachment.consistency.excused = True
        self._open, self._backward_seen, self._reduced, self._stepped = False, False, False, []
        for step in self._under_way:
            step.counted = True
        self._hook.step_done(weights_in_use=weights_in_use)
        self._begins_to_mute |= reduced and not self._hook.reduces_this_step()
        self._attachment.count_step()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        with self._hook.reading_suspended():
            type(self._ddp).zero_grad(self._ddp, set_to_none)

    def weights_loaded(self, module: torch.nn.Module) -> None:
        """``module.load_state_dict()`` has returned; the module may be a part of the model, or another one."""
        if any(parameter in self._parameters for parameter in module.parameters()):
            self._hook.weights_loaded()

    # The consensus for a save, whose end is not announced.

    def open_consensus(self) -> None:
        if not self._consensus_until_forward:
            self._hook.begin_consensus()
            self._consensus_until_forward = True

    def close_consensus(self) -> None:
        if self._consensus_until_forward:
            self._consensus_until_forward = False
            self._hook.end_consensus()

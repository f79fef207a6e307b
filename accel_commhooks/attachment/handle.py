"""attach(): the only code that touches DDP and the optimizer.

An :class:`Attachment` turns what DDP and the optimizer do into the lifecycle of hooks/base.py. It sets one DDP
communication hook, two forward hooks and two global optimizer hooks, and ``detach()`` takes them away again. (DDP cannot
forget a communication hook: what stays is a slot that averages as DDP does, and that a later attach() uses again.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.collectives import WIRE_DTYPES, Communicator
from ..config.config import CommHookConfig
from ..config.errors import CompatibilityError
from ..config.options import HookOptions
from ..config.registry import get_hook
from ..hooks.base import CommHook, HookContext
from ..hooks.plain import AllReduceHook
from ..upstream import seams
from . import compatibility
from .metrics import MetricsWindow


class _Slot:
    """What DDP's one communication hook forwards to: an attached hook, or plain averaging.

    DDP's C++ side holds the slot, where the garbage collector cannot see, so the slot must not hold what holds DDP.
    """

    def __init__(self) -> None:
        self._attachment: weakref.ref[Attachment] | None = None
        self.plain: CommHook | None = None

    @property
    def attachment(self) -> Attachment | None:
        return self._attachment() if self._attachment is not None else None

    @attachment.setter
    def attachment(self, attachment: Attachment | None) -> None:
        self._attachment = weakref.ref(attachment) if attachment is not None else None


def _forward_to_slot(slot, bucket):  # no annotations: DDP compares them with its own classes
    attachment = slot.attachment
    return (attachment.hook if attachment is not None else slot.plain).reduce(bucket)


_slots: weakref.WeakKeyDictionary[DistributedDataParallel, _Slot] = weakref.WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    hook: CommHookConfig | dict | str | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Attachment:
    """Attach a hook to a DDP model. Every rank calls it, before the first backward.

    ``hook`` is a name, a path, a mapping or a config; None reads the environment. The optimizer and the GradScaler are
    found by themselves when not given.
    """
    config = CommHookConfig.load(hook, **options)
    ddp = compatibility.require_ddp(model, config.name)
    if attachment_of(ddp) is not None:
        raise CompatibilityError(
            f"hook '{config.name}' cannot be attached: hook '{attachment_of(ddp).config.name}' is attached to this model "  # type: ignore[union-attr]
            "already; call handle.detach() first, or name the hook in one place only"
        )
    return Attachment(ddp, config, optimizer=optimizer, grad_scaler=grad_scaler)


def attachment_of(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a DDP model, or None."""
    slot = _slots.get(model)  # type: ignore[call-overload]
    return slot.attachment if slot is not None else None


def find_attachment(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a DDP model, or of the DDP model around or inside this one.

    ``Accelerator`` lists a model as it was before DDP was put around it, and torch.compile puts a module around DDP.
    """
    inside = {id(module) for module in model.modules()}
    for ddp, slot in list(_slots.items()):
        if slot.attachment is not None and (id(ddp) in inside or ddp.module is model):
            return slot.attachment
    return None


class Attachment:
    """A hook at work on one DDP model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: CommHookConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ):
        self.config = config
        self.ddp = ddp
        options = config.build_options()
        self.comm = Communicator(
            ddp.process_group, ranks_per_node=options.ranks_per_node, wire_dtype=WIRE_DTYPES[options.wrapper]
        )
        self.parameters = _reduced_parameters(ddp)
        self._parameter_ids = {id(parameter) for parameter in self.parameters}
        self._grad_scaler: torch.amp.GradScaler | None = grad_scaler
        self._looked_for_scaler = grad_scaler is not None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._awaiting_step = False
        self._unreduced_backward = False
        self._asleep: tuple[bool, bool] | None = None
        self._consensus_until_forward = False
        self._backward_watch: Any = None
        context = HookContext(
            comm=self.comm,
            names=self.parameters,
            buffers=dict(ddp.module.named_buffers()),
            module=ddp.module,
            finds_unused=ddp.find_unused_parameters,
            loss_scale=self._loss_scale,
        )
        self._slot = self._claim_slot(ddp, config.name)
        self.hook = get_hook(config.name)(options, context)
        self._slot.attachment = self
        self._slot.plain = AllReduceHook(HookOptions(), dataclasses.replace(context, loss_scale=lambda device: None))
        self._window = MetricsWindow(self)
        self._handles = [
            ddp.register_forward_pre_hook(self.before_forward, prepend=True),
            ddp.register_forward_hook(self._after_forward, always_call=True),
            *_watch_optimizers(self),
        ]
        if type(self.hook).unread is not CommHook.unread:
            # Trainer calls model.zero_grad(), which walks through all parameters and reads none of them.
            ddp.zero_grad = self._zero_grad  # type: ignore[method-assign]
        if optimizer is not None:
            self._bind([innermost_optimizer(optimizer)])

    @staticmethod
    def _claim_slot(ddp: DistributedDataParallel, name: str) -> _Slot:
        slot = _slots.get(ddp)
        if slot is None:
            slot = _Slot()
            try:
                ddp.register_comm_hook(slot, _forward_to_slot)
            except RuntimeError as error:
                raise compatibility.second_hook(name, str(error).splitlines()[0]) from None
            _slots[ddp] = slot
        return slot

    # What users call.

    @property
    def steps(self) -> int:
        """Optimizer steps since training began, those before a resume included."""
        return self.hook.step

    def metrics(self) -> dict[str, float]:
        """Communication figures, averaged over the steps since the previous call."""
        return self._window.read()

    def synchronize(self) -> None:
        """Finish what is under way and make the replicas equal. Every rank calls it."""
        self.hook.synchronize()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """``with handle.consensus():`` evaluates the consensus model. Every rank enters it."""
        self.hook.begin_consensus()
        try:
            yield
        finally:
            self.hook.end_consensus()

    def open_consensus(self) -> None:
        """The same without an end: the next training forward ends it. For saves, which do not say when they are over."""
        if not self._consensus_until_forward:
            self.hook.begin_consensus()
            self._consensus_until_forward = True

    def prepare_save(self) -> None:
        """Gather what is divided among the ranks, so that one rank alone can save. Every rank calls it."""
        self.hook.prepare_save()

    def state_dict(self) -> dict[str, Any]:
        """This rank's hook state: plain values and tensors, by parameter name."""
        return self.hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned on the same rank."""
        self.hook.load_state_dict(state)

    def detach(self) -> None:
        """Take everything away again; DDP then averages plainly."""
        if self._slot.attachment is not self:
            return
        self._close_consensus()
        self._wake()
        self.hook.close()
        self._slot.attachment = None
        for handle in self._handles:
            handle.remove()
        self.ddp.__dict__.pop("zero_grad", None)
        if self._backward_watch is not None:
            self._backward_watch.remove()
        self.comm.close()

    def step_attempted(self) -> None:
        """Tell that an optimizer step is over although this rank's optimizer may not have run (GradScaler)."""
        if self._awaiting_step:
            self._finish_step()

    # What DDP and the optimizer call.

    def before_forward(self, ddp: DistributedDataParallel, args: Any) -> None:
        """DDP's forward is about to run."""
        if not torch.is_grad_enabled():
            self._sleep(only_buffers=True)
            return
        self._close_consensus()
        self._unreduced_backward = False
        if self._awaiting_step and all(p.grad is None for p in self.parameters):
            self._finish_step()  # gradients were cleared without a step: a GradScaler skipped it
        if self.hook.needs_optimizer and not self._optimizers:
            self._bind(seams.optimizers_of(self.parameters))
        self.hook.before_forward()
        if not ddp.require_backward_grad_sync:
            self._sleep(only_buffers=True)
            return
        self._awaiting_step = True
        self._sleep(only_buffers=False)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        with self.hook.unread():
            type(self.ddp).zero_grad(self.ddp, set_to_none)

    def _sleep(self, *, only_buffers: bool) -> None:
        """Keep DDP from talking in this forward (buffers) and in its backward (gradients, bitmap)."""
        if self.hook.reduces_this_step():
            return
        ddp = self.ddp
        self._asleep = (ddp.require_backward_grad_sync, ddp.broadcast_buffers)
        ddp.broadcast_buffers = False
        if not only_buffers:
            ddp.require_backward_grad_sync = False
            self._unreduced_backward = True
            self._watch_backward()

    def _wake(self) -> None:
        if self._asleep is not None:
            self.ddp.require_backward_grad_sync, self.ddp.broadcast_buffers = self._asleep
            self._asleep = None

    def _after_forward(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        self._wake()

    def _watch_backward(self) -> None:
        """Call the hook when a backward that DDP sleeps through is over; nothing if the hook does not care."""
        if type(self.hook).after_unreduced_backward is CommHook.after_unreduced_backward or self._backward_watch:
            return

        reference = weakref.ref(self)  # tensors hold their hooks where the garbage collector cannot see

        def first_gradient(_: Any) -> None:
            alive = reference()
            if alive is not None and alive._unreduced_backward:
                alive._unreduced_backward = False
                seams.at_end_of_backward(lambda: alive.hook.after_unreduced_backward(list(alive.parameters)))

        self._backward_watch = torch.autograd.graph.register_multi_grad_hook(
            [p for p in self.parameters if p.requires_grad], first_gradient, mode="any"
        )

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_ours(optimizer):
            self.hook.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_ours(optimizer):
            self.hook.after_step(optimizer)
            if self._awaiting_step:
                self._finish_step()

    def _finish_step(self) -> None:
        self._awaiting_step = False
        self.hook.step_done()
        self._window.count_step()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if any(optimizer is known for known in self._optimizers):
            return True
        if optimizer in self._strangers:
            return False
        if any(id(p) in self._parameter_ids for group in optimizer.param_groups for p in group["params"]):
            self._bind([*self._optimizers, optimizer])
            return True
        self._strangers.add(optimizer)
        return False

    def _bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.hook.bind(optimizers)

    def _close_consensus(self) -> None:
        if self._consensus_until_forward:
            self._consensus_until_forward = False
            self.hook.end_consensus()

    def _loss_scale(self, device: torch.device) -> torch.Tensor | None:
        if not self._looked_for_scaler:
            self._looked_for_scaler = True
            scalers = seams.live_grad_scalers()
            if len(scalers) > 1:
                raise compatibility.ambiguous_scaler(len(scalers))
            self._grad_scaler = scalers[0] if scalers else None
        if self._grad_scaler is None:
            return None
        return self._grad_scaler.scale(torch.ones((), device=device))


def _watch_optimizers(attachment: Attachment) -> list[Any]:
    """Global step hooks that neither keep the attachment alive nor outlive it."""
    reference = weakref.ref(attachment)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive._before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive._after_step(optimizer)

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    for handle in handles:
        weakref.finalize(attachment, handle.remove)
    return handles


def _reduced_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Parameters that DDP may reduce (a frozen one may thaw), by names that do not change when the model is compiled."""
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in ddp.module.named_parameters()
        if not seams.is_ignored_by_ddp(parameter)
    }


def innermost_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside AcceleratedOptimizer and the like."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer

"""attach(), and the :class:`Attachment` that it returns: the user's handle to a hook at work on one DDP model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.collectives import Communicator
from ..config.config import CommHookConfig
from ..config.errors import CommHookError, CompatibilityError, warn_once
from ..config.registry import get_hook
from ..hooks.base import HookContext
from ..hooks.plain import AllReduceHook, AllReduceOptions
from ..upstream import seams
from ..upstream.callbacks import weak_method
from ..upstream.compiling import CompileWatch, name_without_compile, without_compile
from ..upstream.live_objects import optimizers_of
from . import agreement, compatibility, fingerprint
from .checkpoint import Owner
from .consistency import Consistency
from .discovery import DDPWatch
from .loss_scale import LossScale
from .metrics import MetricsWindow
from .optimizers import innermost_optimizer
from .slot import attachment_of, attachments, claim_slot
from .step import StepClock


def attach(
    model: torch.nn.Module,
    hook: CommHookConfig | dict | str | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Attachment:
    """Attach a hook to a DDP model. Every rank calls it, before the first backward.

    ``hook`` is a name, a path, a mapping or a config; None reads the environment. The optimizer and the GradScaler are
    found automatically when they are not given.
    """
    try:
        config = CommHookConfig.load(hook, **options)
    except CommHookError as error:
        if isinstance(model, DistributedDataParallel):
            agreement.refuse(model, error.text)
        raise
    ddp = compatibility.require_ddp(model, config.name)
    existing = attachment_of(ddp)
    if existing is not None:
        raise CompatibilityError(
            f"hook '{config.name}' cannot be attached: hook '{existing.config.name}' is attached to this model already; "
            "call handle.detach() first, or name the hook in one place only"
        )
    return Attachment(ddp, config, optimizer=optimizer, grad_scaler=grad_scaler)


def find_attachment(model: torch.nn.Module) -> Attachment | None:
    """The attachment of a DDP model, or of the DDP model around or inside this one.

    ``Accelerator`` lists a model as it was before DDP was put around it, and torch.compile puts a module around DDP.
    """
    inside = {id(module) for module in model.modules()}
    plain = without_compile(model)
    return next((found for ddp, found in attachments() if id(ddp) in inside or ddp.module is plain), None)


class _Succession(DDPWatch):
    """Retires an attachment when its model gets another DDP wrapper: the newest wrapper is the model's.

    A batch-size search after running out of memory, a sweep of Trainers and progressive unfreezing all build one.
    """

    def found(self, ddp: torch.nn.Module, module: torch.nn.Module) -> None:
        if next(attachments(), None) is None:
            return
        # Retiring may communicate. Without this, whether an older wrapper is still there would depend on when each rank's
        # garbage collector last ran.
        gc.collect()
        parameters = set(map(id, module.parameters()))
        for _, attachment in attachments():
            if any(id(parameter) in parameters for parameter in attachment.parameters):
                attachment.retire()


_succession = functools.cache(_Succession)


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
        _succession()
        self.config = config
        self._ddp = weakref.ref(ddp)
        options = config.build_options()
        self.parameters = _reduced_parameters(ddp)
        optimizers = [innermost_optimizer(optimizer)] if optimizer is not None else []

        def describe(collect: bool) -> fingerprint.Fingerprint:
            known = optimizers or optimizers_of(self.parameters, collect=collect)
            return {
                **fingerprint.of_options(config.name, options),
                **fingerprint.of_model(ddp, self.parameters),
                **fingerprint.of_optimizers(known),
            }

        agreed = agreement.agree(ddp, config.name, describe)
        self.run = agreed.run
        """A name for this run, the same on every rank."""
        self._saves = 0
        self._expected_weights: int | None = None
        self.comm = Communicator(
            ddp.process_group,
            ranks_per_node=options.ranks_per_node,
            hosts=agreed.hosts,
            device=next((parameter.device for parameter in self.parameters), None),
        )
        self.loss_scale = LossScale(grad_scaler)
        self.compile_watch = CompileWatch(ddp.module)
        context = HookContext(
            comm=self.comm,
            names=self.parameters,
            module=ddp.module,
            finds_unused=ddp.find_unused_parameters,
            loss_scale=self.loss_scale,
            is_compiled=self.compile_watch.is_compiled,
            averaged=weak_method(self._averaged),
        )
        hook_class = get_hook(config.name)
        compatibility.refuse_model(ddp.module, hook_class)
        plain = dataclasses.replace(context, loss_scale=lambda device: None)
        self.slot = claim_slot(ddp, config.name, AllReduceHook(AllReduceOptions(), plain))
        with contextlib.ExitStack() as undo:  # a script may catch the error and go on with plain DDP
            undo.callback(self.comm.close)
            self.hook = hook_class(options, context)
            self.consistency = Consistency(self)
            self._window = MetricsWindow(self)
            self.clock = StepClock(self)
            undo.callback(self.clock.stop)
            if optimizers:
                self.clock.optimizers.bind(optimizers)
            self.slot.attachment = self
            undo.pop_all()

    @property
    def ddp(self) -> DistributedDataParallel:
        """The model. A handle does not keep it alive."""
        ddp = self._ddp()
        assert ddp is not None, "the model is gone"
        return ddp

    @property
    def has_model(self) -> bool:
        """Whether the model is still alive."""
        return self._ddp() is not None

    @property
    def steps(self) -> int:
        """Optimizer steps since training began, those before a resume included."""
        return self.hook.step

    def metrics(self) -> dict[str, float]:
        """Communication figures, averaged over the steps since the previous call."""
        return self._window.read()

    def _averaged(self, steps: int) -> None:
        self.consistency.tick(steps)

    def count_step(self) -> None:
        """Count a finished step in the metrics. Called by the clock."""
        self._window.count_step()

    def synchronize(self) -> None:
        """Finish what is under way and make the replicas equal. Every rank calls it."""
        with self._window.outside_of_steps():
            self.hook.synchronize()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """``with handle.consensus():`` evaluates the consensus model. Every rank enters it."""
        with self._window.outside_of_steps():
            self.hook.begin_consensus()
        try:
            yield
        finally:
            self.hook.end_consensus()

    def open_consensus(self) -> None:
        """Like :meth:`consensus`, but ended by the next training forward; for saves, whose end is not announced."""
        with self._window.outside_of_steps():
            self.clock.open_consensus()

    def prepare_save(self) -> None:
        """Gather state that is divided among the ranks, so that a single rank can save it. Every rank calls it."""
        gc.collect()  # the ranks gather the state of the same optimizers: of those that are in use
        with self._window.outside_of_steps():
            self.consistency.check_now()
            self.hook.prepare_save()

    @property
    def owner(self) -> Owner:
        """What a saved state belongs to."""
        return Owner(self.config.name, self.parameters)

    def new_save(self) -> str:
        """A name for a save, the same on every rank."""
        self._saves += 1
        return f"{self.run}-{self._saves}"

    def expect_weights(self, checksum: int) -> None:
        """The weights of the model, at its next forward, must be those with which the hook's state was saved."""
        self._expected_weights = checksum

    def compare_weights(self) -> None:
        """Called by the clock before the first forward after a load."""
        if self._expected_weights is None:
            return
        expected, self._expected_weights = self._expected_weights, None
        if self.owner.weights() != expected:
            warn_once(
                f"the model does not have the weights with which the state of hook '{self.config.name}' was saved at step "
                f"{self.steps}; load weights and hook from one checkpoint, or detach and attach the hook to start it afresh"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's hook state: plain values and tensors, by parameter name."""
        self.clock.settle()
        return self.hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned on the same rank. Every rank calls it."""
        self.clock.settle()
        self.hook.load_state_dict(state)
        if self.hook.reduces_this_step():
            self.clock.muting.reduce_again()

    def detach(self) -> None:
        """Remove the hook and leave the replicas equal; DDP then averages plainly. Every rank calls it, between two steps."""
        if self.slot.attachment is not self:
            return
        if self.clock.in_step:
            raise CompatibilityError(
                f"hook '{self.config.name}' cannot be detached between backward and optimizer.step(): gradients wait for "
                "the step; call detach() after optimizer.step(), or after zero_grad()"
            )
        self.retire()
        if self.has_model:
            self.clock.muting.reduce_again()

    def retire(self) -> None:
        """Detach wherever the step stands: the model has got another DDP wrapper."""
        if self.slot.attachment is not self:
            return
        gc.collect()  # as in prepare_save()
        with self._window.outside_of_steps():
            self.clock.close_consensus()
            self.hook.close()
            self.loss_scale.equalise(self.comm)
        self.slot.attachment = None
        self.clock.stop()
        self.comm.close()


def _reduced_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Parameters that DDP may reduce (a frozen one may thaw), by names that do not change when the model is compiled."""
    return {
        parameter: name_without_compile(name)
        for name, parameter in ddp.module.named_parameters()
        if not seams.is_ignored_by_ddp(parameter)
    }

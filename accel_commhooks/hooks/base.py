"""CommHook: the lifecycle that every hook follows.

One optimizer step goes through a hook like this, in the same order on every rank::

    begin_backward()            gradients are about to arrive
    reduce(bucket) ...          once for each DDP bucket, in bucket order, from the thread that runs backward
    after_unreduced_backward()  instead, at the end of a backward that DDP did not reduce
    before_step(optimizer)      gradients are final: unscaled and clipped
    after_step(optimizer)       parameters are new
    step_done()                 once for each step, including one that a GradScaler skipped
    catch_up()                  weights may be written: what an earlier step_done() had to leave

Forwards are not in this list: scripts run any number of them, and ranks run different numbers. See attachment/step.py for
what a step is. A hook talks to other ranks only through ``self.comm``. It never reaches into DDP, Accelerate or Trainer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..comm.collectives import Communicator
from ..comm.cost import Prediction, Problem
from ..comm.process_group import GradBucket
from ..config.options import HookOptions

State = dict[str, Any]


@dataclass
class HookContext:
    """What a hook is told about the model it serves."""

    comm: Communicator
    names: dict[torch.Tensor, str]
    """Name of every parameter that DDP may reduce, in the model's order; tied weights appear once."""
    module: torch.nn.Module
    finds_unused: bool
    """Whether DDP may leave parameters that no rank used untouched (find_unused_parameters)."""
    loss_scale: Callable[[torch.device], torch.Tensor | None]
    """The loss scale of the backward under way as a tensor on the device, or None without a GradScaler."""
    is_compiled: Callable[[], bool] = lambda: False
    """Whether the forward is compiled: then it reads parameters without going through their modules."""
    averaged: Callable[[int], None] = lambda steps: None
    """To be called where all replicas have been averaged after some steps in which DDP did not reduce."""


class CommHook:
    """Base class of all hooks. Every method is optional but :meth:`reduce`."""

    name: ClassVar[str]
    Options: ClassVar[type[HookOptions]] = HookOptions
    counted: ClassVar[bool] = True
    """False for a hook whose traffic does not go through ``self.comm``."""
    needs_optimizer: ClassVar[bool] = False
    """True for a hook that must know the optimizers before the first backward."""
    plain_tensors_only: ClassVar[bool] = True
    """False for a hook that can average sparse and complex gradients."""
    allows_repeated_closures: ClassVar[bool] = False
    """True for a hook that does not care how many backwards a step has (LBFGS)."""
    optimizer_state_is_common: ClassVar[bool] = True
    """False for a hook with which ranks keep optimizer state of their own."""
    equals_ddp: ClassVar[bool] = False
    """True for a hook with which weights become what they are under plain DDP, but for the rounding of :meth:`wire_dtype`."""
    replicas_agree: ClassVar[bool] = True
    """False for a hook after whose ``synchronize`` replicas may still differ."""
    bench_options: ClassVar[dict[str, Any]] = {}
    """Options that bench sets where the user did not; for a hook that must be asked for explicitly elsewhere."""

    @property
    def steps_in_backward(self) -> bool:
        """True if parameters have moved by the end of backward, when gradients can no longer be clipped."""
        return False

    def __init__(self, options: HookOptions, context: HookContext):
        self.options: Any = options
        self.context = context
        self.comm = context.comm
        self.step = 0
        """Optimizer steps done since training began."""

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction | None:
        """What a step costs once the hook acts, put together from ``comm.cost``; None where there is no formula."""
        return None

    @classmethod
    def wire_dtype(cls, options: Any) -> str | None:
        """The type in which gradients travel, where it is another than their own."""
        return getattr(options, "wire_dtype", None)

    # One step.

    def reduces_this_step(self) -> bool:
        """Return False to keep DDP from communicating in this step: no buckets, no buffer broadcasts, no bitmaps."""
        return True

    def before_forward(self) -> None:
        """Parameters are about to be read by a forward in grad mode. For local work only: ranks differ in their forwards."""

    def begin_backward(self) -> None:
        """Gradients are about to arrive; called once for each backward, micro-batches under no_sync included.

        Weights must not be written here: autograd has saved them.
        """

    def discard(self, kept: torch.Tensor | None) -> None:
        """Gradients were cleared without a step: no memory may keep them.

        ``kept`` is None where that is certain. Where gradients were perhaps zeroed in place, it is a tensor on the device
        that is true if some are not zero, and so are still to be stepped with.
        """

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket; the Future's value is what DDP writes into the gradients."""
        raise NotImplementedError

    def after_unreduced_backward(self, parameters: list[torch.Tensor]) -> None:
        """Called at the end of a backward that DDP did not reduce."""

    def abandon_backward(self) -> None:
        """A backward raised an error: forget the buckets that were under way."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Just before the optimizer steps."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Just after the optimizer stepped."""

    def step_done(self, *, weights_in_use: bool = False) -> None:
        """The step is over, on every rank, whether or not a GradScaler let this rank's optimizer run.

        ``weights_in_use`` is True where only the next backward shows that it is over. Weights must not be written then;
        :meth:`catch_up` is called when they may be.
        """
        self.step += 1

    def catch_up(self) -> None:
        """Weights may be written now: do what :meth:`step_done` had to leave. Called after every optimizer's step."""

    def weights_loaded(self) -> None:
        """``load_state_dict`` has replaced weights of the model."""

    # Around the steps.

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """The optimizers that hold this model's parameters, as soon as they are known."""

    def synchronize(self) -> None:
        """Finish what is under way and make all replicas equal. Collective. Called before a save and at the end."""

    def begin_consensus(self) -> None:
        """Make the visible weights the consensus of all ranks, for an evaluation or a save."""
        self.synchronize()

    def end_consensus(self) -> None:
        """The evaluation or save is over: local weights may be restored."""

    def prepare_save(self) -> None:
        """Collective work that a checkpoint needs before one rank alone writes it."""

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors that have the same bits on every rank now, by kind and by name. Asked where gradients begin to arrive, after
        an averaging, and before a save."""
        return {"weights": {name: p for p, name in self.context.names.items() if p.requires_grad}}

    def reading_suspended(self) -> contextlib.AbstractContextManager[None]:
        """A context in which parameters are iterated over but not read, as zero_grad() does."""
        return contextlib.nullcontext()

    def metrics(self) -> dict[str, float]:
        """The hook's own figures for the logs; may synchronise with the device."""
        return {}

    def close(self) -> None:
        """Undo everything this hook set up outside itself."""

    # Checkpoints. A state is a mapping of plain values and tensors, by parameter name.

    def state_dict(self) -> State:
        """This rank's state."""
        return {"step": self.step}

    def load_state_dict(self, state: State) -> None:
        """Restore what :meth:`state_dict` returned on the same rank, at the same world size."""
        self.step = state["step"]

    def merge_states(self, states: Iterable[State]) -> State:
        """Merge the states of all ranks of a run at another world size into one that every rank of this run can load."""
        return next(iter(states))


def new_future(device: torch.device) -> torch.futures.Future:
    """A Future for DDP whose value is set later, from the thread and under the stream that produced it."""
    return torch.futures.Future() if device.type in ("cpu", "meta") else torch.futures.Future(devices=[device])


class QueueHook(CommHook):
    """A hook that issues its work bucket by bucket and collects it, in order, at the last bucket."""

    def __init__(self, options: HookOptions, context: HookContext):
        super().__init__(options, context)
        self._queue: list[tuple[torch.futures.Future, Callable[[], torch.Tensor]]] = []

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        """Issue the bucket's collective; the function returned waits for it and gives the averaged buffer."""
        raise NotImplementedError

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = new_future(bucket.buffer().device)
        self._queue.append((future, self.start(bucket)))
        if bucket.is_last():
            self.drain()
        return future

    def abandon_backward(self) -> None:
        self._queue = []

    def drain(self) -> None:
        """Complete the Futures of all buckets of this backward, in bucket order."""
        queue, self._queue = self._queue, []
        for future, finish in queue:
            future.set_result(finish())

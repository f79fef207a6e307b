"""CommHook: the lifecycle that every hook follows.

One optimizer step goes through a hook like this, in the same order on every rank::

    before_forward()            for each micro-batch
    reduce(bucket) ...          once for each DDP bucket, in bucket order, from the thread that runs backward
    before_step(optimizer)      gradients are final: unscaled and clipped
    after_step(optimizer)       parameters are new
    step_done()                 once for each step, including one that a GradScaler skipped

A hook talks to other ranks only through ``self.comm``. It never reaches into DDP, Accelerate or Trainer.
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
    buffers: dict[str, torch.Tensor]
    module: torch.nn.Module
    finds_unused: bool
    """Whether DDP may leave parameters that no rank used untouched (find_unused_parameters)."""
    loss_scale: Callable[[torch.device], torch.Tensor | None]
    """The current loss scale as a tensor on the device, or None without a GradScaler."""


class CommHook:
    """Base class of all hooks. Every method is optional but :meth:`reduce`."""

    name: ClassVar[str]
    Options: ClassVar[type[HookOptions]] = HookOptions
    counted: ClassVar[bool] = True
    """False for a hook whose traffic does not go through ``self.comm``."""
    needs_optimizer: ClassVar[bool] = False
    """True for a hook that must know the optimizers before the first backward."""
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

    # One step.

    def reduces_this_step(self) -> bool:
        """Return False to keep DDP from communicating in this step: no buckets, no buffer broadcasts, no bitmaps."""
        return True

    def before_forward(self) -> None:
        """Called before each forward that will have a backward, micro-batches under no_sync included."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket; the Future's value is what DDP writes into the gradients."""
        raise NotImplementedError

    def after_unreduced_backward(self, parameters: list[torch.Tensor]) -> None:
        """Called at the end of a backward that DDP did not reduce."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Just before the optimizer steps."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Just after the optimizer stepped."""

    def step_done(self) -> None:
        """The step is over, on every rank, whether or not a GradScaler let this rank's optimizer run."""
        self.step += 1

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
    return torch.futures.Future() if device.type == "cpu" else torch.futures.Future(devices=[device])


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

    def drain(self) -> None:
        """Complete the Futures of all buckets of this backward, in bucket order."""
        queue, self._queue = self._queue, []
        for future, finish in queue:
            future.set_result(finish())

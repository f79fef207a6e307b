"""ZeRO overlap: optimizer state divided among the ranks (ZeRO-1, arXiv:1910.02054), communication hidden.

Each rank owns a part of every parameter (sharding.py). In backward each bucket is reduce-scattered, so that a rank gets the
mean of the gradients it owns (delivery.py). The optimizer steps the owned parts (stepping.py). Then the parts are gathered
in the background, and a parameter is waited for when it is read (gathering.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ...comm.cost import Prediction, Problem
from ...comm.process_group import GradBucket
from ...comm.wire import wire_dtype_named
from ...config.errors import CompatibilityError
from ...config.registry import register_hook
from ...upstream import seams
from ...upstream.callbacks import WeakList
from ..base import CommHook, HookContext, State
from .cost import zero_overlap_cost
from .delivery import BucketInFlight, DeliveredGradients, Parts, deliver, share_norms
from .gathering import ParameterGather
from .optimizer_state import DividedState
from .options import ELEMENTWISE, ZeroOverlapOptions
from .sharding import EvenSlices, Ownership, WholeParameters
from .shards import Shards
from .stepping import ShardedStep


@register_hook("zero_overlap")
class ZeroOverlapHook(CommHook):
    """Optimizer state divided among the ranks, DDP's bytes, parameters gathered in the background."""

    Options = ZeroOverlapOptions
    equals_ddp = True
    needs_optimizer = True
    optimizer_state_is_common = False

    def __init__(self, options: ZeroOverlapOptions, context: HookContext):
        super().__init__(options, context)
        wire_dtype, order = wire_dtype_named(options.wire_dtype), list(context.names)
        self._ownership: Ownership = (
            EvenSlices(self.comm, wire_dtype)
            if options.shard_buckets
            else WholeParameters(self.comm, wire_dtype, order)
        )
        for parameter, name in context.names.items():
            if parameter.requires_grad and not parameter.is_contiguous():
                raise CompatibilityError(
                    f"zero_overlap cuts parameters into slices, which '{name}' does not allow: it is not contiguous; call "
                    "model.to(memory_format=torch.contiguous_format) before DDP is built"
                )
        self._order = {id(p): index for index, p in enumerate(order)}
        self._shards = Shards(self._ownership, context.names, wire_dtype)
        self._state = DividedState(self._shards)
        self._delivered = DeliveredGradients(self._ownership, context.names)
        self._sharded_step = ShardedStep(self._shards)
        self._gather = ParameterGather(self._shards, context.module, wire_dtype)
        self._queue: list[BucketInFlight] = []
        self._optimizers = WeakList()
        self._stepped: list[torch.Tensor] = []
        # Which parameters no rank used is only known when backward is over.
        self._interleaves = options.step == "interleaved" and not context.finds_unused
        self._stepping: dict[int, torch.Tensor] | None = None
        """Inside backward: the gradients to step with, by the parameter's id."""
        self._stepped_in_backward: set[int] = set()
        """Ids of the optimizers whose next step has been taken already."""

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction | None:
        return zero_overlap_cost(options, problem)

    @property
    def steps_in_backward(self) -> bool:
        return self.options.step != "optimizer"

    # Knowing the optimizer.

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._refuse_unless_elementwise(optimizer)
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._optimizers):
                self._state.take_over(optimizer)
        self._optimizers = WeakList(optimizers)

    def _refuse_unless_elementwise(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        stock = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
        if not stock and kind.__name__ not in self.options.elementwise:
            raise CompatibilityError(
                f"zero_overlap gives each rank a slice of every parameter, so the optimizer must treat every element by "
                f"itself; {kind.__module__}.{kind.__name__} is not known to. If it does, declare it: elementwise: "
                f"[{kind.__name__}]; if it looks at whole matrices or norms (Adafactor, LAMB, LBFGS, Muon), use another "
                f"hook. Known: {', '.join(ELEMENTWISE)}"
            )

    # Backward.

    def before_forward(self) -> None:
        self._sharded_step.recover()
        self._delivered.watch_for_more()
        if self.context.is_compiled():
            self.synchronize()

    def begin_backward(self) -> None:
        self._delivered.watch_for_more()  # gradients may be there that were not when its forward ran

    def abandon_backward(self) -> None:
        self._queue = []

    def _check_step_in_backward(self, bucket: GradBucket) -> None:
        if not self._optimizers:
            raise CompatibilityError(
                f"zero_overlap with step: {self.options.step} steps inside backward, but no optimizer holds this model's "
                "parameters yet; make it before the first backward, or pass attach(..., optimizer=...)"
            )
        if self._stepped_in_backward:
            raise CompatibilityError(
                f"zero_overlap with step: {self.options.step} has stepped inside the last backward, but another backward "
                "begins before optimizer.step(), as if its gradients were discarded or accumulated; set step: optimizer, or "
                "accumulate under no_sync()"
            )
        if self.context.loss_scale(bucket.buffer().device) is not None:
            raise CompatibilityError(
                f"zero_overlap with step: {self.options.step} steps before gradients can be unscaled, but a GradScaler "
                "is in use; set step: optimizer"
            )

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._queue:
            self.synchronize()  # parameters that the forward did not use
            if self.steps_in_backward:
                self._check_step_in_backward(bucket)
        taken = BucketInFlight(bucket, self._ownership)
        self._queue.append(taken)
        if self._interleaves and len(self._queue) > 1:
            self._step_now(self._queue[-2].receive())
        if bucket.is_last():
            self._finish_backward()
        return taken.future

    def _finish_backward(self) -> None:
        queue, self._queue = self._queue, []
        for taken in queue:
            taken.receive()
        if self._interleaves:
            self._step_now(queue[-1].parts)
        if not self.steps_in_backward:
            share_norms(self.comm, queue)
        deliver(queue)
        # DDP writes the gradients in an end-of-backward call that is queued after this one: queue another.
        seams.at_very_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """DDP has written the gradients, but for those of parameters that no rank used."""
        if self.steps_in_backward and not self._interleaves:
            self._step_now([(p, self._own_gradient(p)) for p in self.context.names if p.grad is not None])
        self._delivered.record()

    def _own_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        start, stop = self._ownership.range(parameter)
        return parameter.grad.detach().view(-1)[start:stop]  # type: ignore[union-attr]

    # The step.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sharded_step.recover()
        self.synchronize()  # after a step without a backward parameters may still be on their way
        self._state.outdate()
        done = self._stepping is None and id(optimizer) in self._stepped_in_backward
        if done:
            self._refuse_changed_gradients()
        self._stepped = self._sharded_step.begin(
            optimizer, (lambda _: None) if done else self._gradient, keep_strangers=self._stepping is None
        )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sharded_step.end()
        self._gather.start(sorted(self._stepped, key=lambda p: self._order[id(p)]))
        if not self.options.overlap:
            self.synchronize()
        if self._stepping is None:
            self._stepped_in_backward.discard(id(optimizer))

    def _step_now(self, parts: Parts) -> None:
        """Step inside backward, with the gradients that have arrived; the step that the loop takes later does nothing."""
        self._stepping = {id(parameter): part for parameter, part in parts}
        try:
            for optimizer in self._optimizers:
                optimizer.step()
                self._stepped_in_backward.add(id(optimizer))
        finally:
            self._stepping = None

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What this rank steps with; None for a parameter that has no gradient."""
        if not parameter.requires_grad:
            return None
        if self._stepping is not None:
            return self._stepping.get(id(parameter))
        return self._own_gradient(parameter) if parameter.grad is not None else None

    def _refuse_changed_gradients(self) -> None:
        for name in self._delivered.changed():
            raise CompatibilityError(
                f"the gradient of '{name}' was changed after backward (by clipping?), but zero_overlap with step: "
                f"{self.options.step} has stepped already; set step: optimizer, or do not clip"
            )

    # Around the steps.

    def synchronize(self) -> None:
        """Every parameter is whole on every rank."""
        self._gather.finish_all()

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        self.synchronize()
        return super().common()

    def reading_suspended(self) -> contextlib.AbstractContextManager[None]:
        return self._gather.reading_suspended()

    def metrics(self) -> dict[str, float]:
        waited, self._gather.waited = self._gather.waited, 0.0
        held = sum(
            v.numel() * v.element_size()
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for v in state.values()
            if torch.is_tensor(v)
        )
        return {"optimizer_state_mb": held / 1e6, "forward_wait_s": waited}

    def close(self) -> None:
        """Leave the optimizers with their whole state. Collective, like attaching."""
        self.synchronize()
        self._delivered.stop_watching()
        self._state.give_back(self._optimizers)

    # Checkpoints.

    def prepare_save(self) -> None:
        """Gather the optimizers' whole state on the ranks that may write it."""
        self.synchronize()
        self._state.gather(self._optimizers, keep=self.comm.rank in self.comm.topology.leaders)

    def state_dict(self) -> State:
        return {**super().state_dict(), **self._shards.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._shards.load_state_dict(state)

    def merge_states(self, states: Iterable[State]) -> State:
        all_states = list(states)
        return {**all_states[0], **self._shards.merge(all_states)}

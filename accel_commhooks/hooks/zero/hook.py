"""ZeRO overlap: optimizer state divided among the ranks (ZeRO-1, arXiv:1910.02054), communication hidden.

Each rank owns a part of every parameter (sharding.py). In backward, each bucket is reduce-scattered, so a rank gets the
mean of the gradients it owns. Just for the time of ``optimizer.step()``, the user's own optimizer is handed parameters that
are views of the owned parts; its state therefore has 1/W of the size, and groups, schedules and options are its own. Then
the parts are gathered, in the background: a parameter is waited for when somebody reads it, be it the next forward, an
evaluation, ``state_dict()`` or a loop over ``parameters()``.

What a rank does not own of ``p.grad`` nobody steps with, so it carries the rest of the norm: one element holds the root of
what the other ranks' parts add to the square. ``clip_grad_norm_`` then returns the true norm and scales alike everywhere,
and a non-finite gradient on one rank is seen by the GradScaler of all.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...comm.collectives import WIRE_DTYPES
from ...config.errors import CompatibilityError
from ...config.options import HookOptions, option
from ...config.registry import register_hook
from ...upstream import seams
from ..base import CommHook, HookContext, State, new_future
from .optimizer_state import DividedState
from .sharding import GATHER_BYTES, EvenSlices, Ownership, Shards, WholeParameters

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)


def _are_names(value: list) -> str | None:
    if all(isinstance(name, str) for name in value):
        return None
    return f"elementwise must be a list of optimizer class names, but got {value!r}"


@dataclass(kw_only=True)
class ZeroOverlapOptions(HookOptions):
    step: str = option(
        "optimizer",
        "When the optimizer steps: in optimizer.step(), at the end of backward, or interleaved bucket by bucket.",
        choices=("optimizer", "backward", "interleaved"),
    )
    shard_buckets: bool = option(
        True, "true: even slices of every parameter; false: whole parameters to single ranks, as torch's default."
    )
    wire_dtype: str | None = option(
        None,
        "Type in which gradients and parameters travel: fp16 or bf16; owners keep masters in full precision.",
        choices=(None, "fp16", "bf16"),
    )
    elementwise: list = option(
        [], "Class names of optimizers outside torch.optim that treat every element by itself.", check=_are_names
    )


@register_hook("zero_overlap")
class ZeroOverlapHook(CommHook):
    """Optimizer state divided among the ranks, DDP's bytes, gathers hidden behind what follows the step."""

    Options = ZeroOverlapOptions
    needs_optimizer = True

    def __init__(self, options: ZeroOverlapOptions, context: HookContext):
        super().__init__(options, context)
        self._wire_dtype = WIRE_DTYPES[options.wire_dtype]
        order = list(context.names)
        self._ownership: Ownership = (
            EvenSlices(self.comm, self._wire_dtype)
            if options.shard_buckets
            else WholeParameters(self.comm, self._wire_dtype, order)
        )
        self._order = {id(p): index for index, p in enumerate(order)}
        self._shards = Shards(self._ownership, context.names, self._wire_dtype)
        self._state = DividedState(self._shards)
        for parameter, name in context.names.items():
            if parameter.requires_grad and not parameter.is_contiguous():
                raise CompatibilityError(
                    f"zero_overlap cuts parameters into slices, which '{name}' does not allow: it is not contiguous; call "
                    "model.to(memory_format=torch.contiguous_format) before DDP is built"
                )
        self._queue: list[_Bucket] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._in_step: torch.optim.Optimizer | None = None
        self._swapped: list[tuple[dict, list[torch.Tensor]]] = []
        self._stepped: list[torch.Tensor] = []
        self._arriving: dict[int, Callable[[], None]] = {}
        self._end_guard: Callable[[], None] | None = None
        # Which parameters no rank used is only known when backward is over.
        self._interleaves = options.step == "interleaved" and not context.finds_unused
        self._stepping: dict[int, torch.Tensor] | None = None
        """Inside backward: the gradients to step with, by the parameter's id."""
        self._stepped_in_backward: set[int] = set()
        """Ids of the optimizers whose next step has been taken already."""
        self._versions: dict[int, int] = {}
        """Of the gradients as they were delivered, by the parameter's id."""
        self._watch: Any = None
        self._waited = 0.0
        self._unread = False

    @property
    def steps_in_backward(self) -> bool:
        return self.options.step != "optimizer"

    # Knowing the optimizer.

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._refuse_unless_elementwise(optimizer)
            if not any(optimizer is known for known in self._optimizers):
                self._state.take_over(optimizer)
        # The ranks may have found them in different orders.
        self._optimizers = sorted(optimizers, key=self._places)

    def _places(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Where in the model an optimizer's parameters are."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return sorted(self._order[id(p)] for p in parameters if id(p) in self._order)

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

    # Gradients.

    def before_forward(self) -> None:
        if self.steps_in_backward and not self._optimizers:
            raise CompatibilityError(
                f"zero_overlap with step: {self.options.step} steps inside backward, but no optimizer holds this model's "
                "parameters yet; make it before the first backward, or pass attach(..., optimizer=...)"
            )
        if self._in_step is not None:
            self._give_back()
            raise CompatibilityError(
                "a forward began although optimizer.step() is not over (or has failed), but zero_overlap steps with "
                "gradients that were there before; run forward and backward first, then optimizer.step() without a closure"
            )
        self._watch_for_more()
        if seams.is_compiled(self.context.module):
            self.synchronize()  # compiled code reads parameters without asking

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._queue:
            self.synchronize()  # parameters that the forward did not use
            if self.steps_in_backward and self.context.loss_scale(bucket.buffer().device) is not None:
                raise CompatibilityError(
                    f"zero_overlap with step: {self.options.step} steps before gradients can be unscaled, but a GradScaler "
                    "is in use; set step: optimizer"
                )
        taken = _Bucket(bucket, self._ownership)
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
            self._share_norms(queue)
        for taken in queue:
            taken.deliver()
        # DDP writes the gradients in an end-of-backward call that is queued after this one: queue another.
        seams.at_end_of_backward(lambda: seams.at_end_of_backward(self._end_backward))

    def _end_backward(self) -> None:
        """DDP has written the gradients, but for those of parameters that no rank used."""
        if self.steps_in_backward and not self._interleaves:
            self._step_now([(p, self._own_gradient(p)) for p in self.context.names if p.grad is not None])
        self._versions = {id(p): p.grad._version for p in self.context.names if p.grad is not None}

    def _own_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        start, stop = self._ownership.range(parameter)
        return parameter.grad.detach().view(-1)[start:stop]  # type: ignore[union-attr]

    def _watch_for_more(self) -> None:
        """A backward without zero_grad() adds up: make room when its first gradient is there, or is this just a look?"""
        self._stop_watching()
        self._versions = {id(p): self._versions[id(p)] for p in self._delivered()}
        if self._versions:
            trained = [p for p in self.context.names if p.requires_grad]
            make_room = _weak(self._make_room_for_more)
            self._watch = torch.autograd.graph.register_multi_grad_hook(trained, make_room, mode="any")

    def _delivered(self) -> list[torch.Tensor]:
        """Parameters whose gradients are what this hook made of them, and not None again."""
        return [p for p in self.context.names if p.grad is not None and id(p) in self._versions]

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _make_room_for_more(self, first_gradient: torch.Tensor) -> None:
        """Let what is owned count in full, the rest not at all.

        The next mean divides by the number of ranks, and only the owner has the gradient of before.
        """
        for parameter in self._delivered():
            start, stop = self._ownership.range(parameter)
            flat = parameter.grad.detach().view(-1)  # type: ignore[union-attr]
            flat[:start].zero_()
            flat[start:stop].mul_(self.comm.size)
            flat[stop:].zero_()
        self._versions = {}

    def _share_norms(self, queue: list[_Bucket]) -> None:
        """One small all-reduce a step: every parameter's squared norm over all ranks."""
        # One number a parameter, so double precision costs nothing, and the reported norm is right to the last digit.
        parts = [part for taken in queue for _, part in taken.parts]
        double = torch.float64 if parts[0].device.type != "mps" else torch.float32
        own = torch.stack([torch.linalg.vector_norm(part, dtype=double) for part in parts]).square()
        total = self.comm.all_reduce(own.clone(), mean=False).wait()
        rest = (total - own).clamp_min(0).sqrt()
        rest = torch.where(torch.isfinite(total), rest, total)
        offset = 0
        for taken in queue:
            taken.carry(rest[offset : offset + len(taken.parts)])
            offset += len(taken.parts)

    # The step.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand the optimizer the owned parts in place of the parameters; outside of a step it looks as ever."""
        if self._in_step is not None:  # and raised an error
            self._give_back()
        self._state.outdate()
        done = self._stepping is None and id(optimizer) in self._stepped_in_backward
        if done:
            self._refuse_changed_gradients()
        self._in_step = optimizer
        self._swapped = [(group, group["params"]) for group in optimizer.param_groups]
        self._stepped = []
        for group, parameters in self._swapped:
            parts = []
            for parameter in parameters:
                if parameter not in self._shards:
                    if self._stepping is None:
                        parts.append(parameter)
                    continue
                if not done and self._has_gradient(parameter):
                    self._stepped.append(parameter)
                    shard = self._shards.refresh(parameter)
                    shard.grad = self._gradient(parameter).to(shard.dtype)
                    if parameter in optimizer.state:
                        optimizer.state[shard] = optimizer.state.pop(parameter)
                    if shard.numel():
                        parts.append(shard)
            group["params"] = parts

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._give_back()
        self._gather(sorted(self._stepped, key=lambda p: self._order[id(p)]))
        if self._stepping is None:
            self._stepped_in_backward.discard(id(optimizer))

    def _give_back(self) -> None:
        """The step is over: the optimizer has its parameters again."""
        assert self._in_step is not None
        state = self._in_step.state
        for group, parameters in self._swapped:
            group["params"] = parameters
            for parameter in parameters:
                shard = self._shards.get(parameter)
                if shard is not None:
                    shard.grad = None
                    if shard in state:
                        state[parameter] = state.pop(shard)
        self._in_step, self._swapped = None, []

    def _step_now(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Step inside backward, with the gradients that have arrived; the step that the loop takes later does nothing."""
        self._stepping = {id(parameter): part for parameter, part in pairs}
        try:
            for optimizer in self._optimizers:
                optimizer.step()
                self._stepped_in_backward.add(id(optimizer))
        finally:
            self._stepping = None

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        if not parameter.requires_grad:
            return False
        return parameter.grad is not None if self._stepping is None else id(parameter) in self._stepping

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank steps with."""
        return self._own_gradient(parameter) if self._stepping is None else self._stepping[id(parameter)]

    def _refuse_changed_gradients(self) -> None:
        for parameter, name in self.context.names.items():
            gradient = parameter.grad
            if gradient is not None and self._versions.get(id(parameter), gradient._version) != gradient._version:
                raise CompatibilityError(
                    f"the gradient of '{name}' was changed after backward (by clipping?), but zero_overlap with step: "
                    f"{self.options.step} has stepped already; set step: optimizer, or do not clip"
                )

    # Parameters on their way.

    def _gather(self, parameters: list[torch.Tensor]) -> None:
        """Start gathering, in the model's order, in pieces small enough for the first layers to start early."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = 0
        for index, parameter in enumerate(parameters):
            flat = parameter.detach().view(-1)
            if self._wire_dtype is not None:
                start, stop = self._ownership.range(parameter)
                flat[start:stop].copy_(self._shards.get(parameter).detach())  # type: ignore[union-attr]
            pairs.append((parameter, flat))
            size += flat.numel() * flat.element_size()
            following = parameters[index + 1] if index + 1 < len(parameters) else None
            if size >= GATHER_BYTES or following is None or following.dtype != parameter.dtype:
                self._start_gather(pairs)
                pairs, size = [], 0
        if self._arriving and self._end_guard is None:
            self._end_guard = seams.guard_parameters(self.context.module, _weak(self._finish))

    def _start_gather(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        finish = self._ownership.gather(pairs, dtype=self._wire_dtype)
        members = [id(parameter) for parameter, _ in pairs]

        def finish_all() -> None:
            start = time.perf_counter()
            finish()
            self._waited += time.perf_counter() - start
            for member in members:
                self._arriving.pop(member, None)

        self._arriving.update(dict.fromkeys(members, finish_all))

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        self._unread = True
        try:
            yield
        finally:
            self._unread = False

    def _finish(self, parameter: torch.Tensor) -> None:
        arriving = self._arriving.get(id(parameter))
        if arriving is not None and not self._unread:
            with torch.no_grad():
                arriving()

    def synchronize(self) -> None:
        """Every parameter is whole on every rank."""
        for arriving in list(dict.fromkeys(self._arriving.values())):
            with torch.no_grad():
                arriving()
        if self._end_guard is not None:
            self._end_guard()
            self._end_guard = None

    # Checkpoints.

    def prepare_save(self) -> None:
        """Gather the optimizers' whole state on the ranks that may write it."""
        self.synchronize()
        self._state.gather(self._optimizers, keep=self.comm.rank in self.comm.topology.leaders)

    def state_dict(self) -> State:
        return {**super().state_dict(), "masters": self._shards.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._shards.load_state_dict(state["masters"])

    def merge_states(self, states: Iterable[State]) -> State:
        all_states = list(states)
        return {**all_states[0], "masters": self._shards.merge(state["masters"] for state in all_states)}

    # Figures and end.

    def metrics(self) -> dict[str, float]:
        waited, self._waited = self._waited, 0.0
        held = sum(
            v.numel() * v.element_size()
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for v in state.values()
            if torch.is_tensor(v)
        )
        return {"optimizer_state_mb": held / 1e6, "forward_wait_s": waited}

    def close(self) -> None:
        """Give the optimizers back whole; collective, like attaching."""
        self.synchronize()
        self._stop_watching()
        self._state.give_back(self._optimizers)


class _Bucket:
    """A bucket on its way: packed and sent, received as this rank's parts, delivered to DDP."""

    def __init__(self, bucket: dist.GradBucket, ownership: Ownership):
        self._buffer = bucket.buffer()
        self._ownership = ownership
        self.future = new_future(self._buffer.device)
        self._parameters = bucket.parameters()
        sizes = [p.numel() for p in self._parameters]
        self._receive = ownership.reduce(list(zip(self._parameters, self._buffer.split(sizes), strict=True)))
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rest: torch.Tensor | None = None

    def receive(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, owned part of its mean gradient) pairs."""
        if not self.parts:
            self.parts = list(zip(self._parameters, self._receive(), strict=True))
        return self.parts

    def carry(self, rest: torch.Tensor) -> None:
        """What the others' parts add to each parameter's norm."""
        self._rest = rest.to(self._buffer.dtype)

    def deliver(self) -> None:
        self._buffer.zero_()
        offset, places, carried = 0, [], []
        for index, (parameter, part) in enumerate(self.parts):
            start, stop = self._ownership.range(parameter)
            self._buffer[offset + start : offset + stop].copy_(part)
            if stop - start < parameter.numel():
                places.append(offset + (stop if stop < parameter.numel() else start - 1))
                carried.append(index)
            offset += parameter.numel()
        if self._rest is not None and places:
            for place, index in zip(places, carried, strict=True):
                self._buffer[place : place + 1].copy_(self._rest[index : index + 1])
        self.future.set_result(self._buffer)


def _weak(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """The method for as long as its object lives: DDP and tensors hold what the garbage collector cannot see."""
    reference = weakref.WeakMethod(method)

    def call(tensor: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(tensor)

    return call

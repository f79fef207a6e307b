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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import seams
from ..collectives import WIRE_DTYPES
from ..errors import CompatibilityError
from ..options import HookOptions, option
from ..registry import register_hook
from ..sharding import EvenSlices, Ownership, WholeParameters
from .base import CommHook, HookContext, State, new_future

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
GATHER_BYTES = 8 * 2**20


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
        for parameter, name in context.names.items():
            if parameter.requires_grad and not parameter.is_contiguous():
                raise CompatibilityError(
                    f"zero_overlap cuts parameters into slices, which '{name}' does not allow: it is not contiguous; call "
                    "model.to(memory_format=torch.contiguous_format) before DDP is built"
                )
        self._queue: list[_Bucket] = []
        self._shards: dict[int, torch.nn.Parameter] = {}
        self._swapped: list[tuple[dict, list[torch.Tensor]]] = []
        self._arriving: dict[int, Callable[[], None]] = {}
        self._end_guard: Callable[[], None] | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._handles: list[Any] = []
        self._full_state: dict[int, dict[int, dict[str, Any]]] | None = None
        self._loaded_masters: dict[str, torch.Tensor] = {}
        self._stepping: dict[int, torch.Tensor] | None = None
        """Inside backward: the gradients to step with, by the parameter's id."""
        self._stepped_in_backward = False
        self._versions: dict[int, int] = {}
        """Of the gradients as they were delivered, by the parameter's id, until a step used them."""
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
                self._handles += [
                    optimizer.register_state_dict_post_hook(self._state_dict_of),
                    optimizer.register_load_state_dict_post_hook(self._divide_state),
                ]
                self._divide_state(optimizer)
        self._optimizers = list(optimizers)

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
        self._make_room_for_more()
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
        if self.options.step == "interleaved" and len(self._queue) > 1:
            self._step_now(self._queue[-2].receive())
        if bucket.is_last():
            self._finish_backward()
        return taken.future

    def _finish_backward(self) -> None:
        queue, self._queue = self._queue, []
        if self.options.step == "interleaved":
            self._step_now(queue[-1].receive())
        elif self.options.step == "backward":
            self._step_now([pair for taken in queue for pair in taken.receive()])
        else:
            for taken in queue:
                taken.receive()
            self._share_norms(queue)
        for taken in queue:
            taken.deliver()
        # DDP writes the gradients in an end-of-backward call that is queued after this one: queue another.
        seams.at_end_of_backward(lambda: seams.at_end_of_backward(self._note_gradients))

    def _make_room_for_more(self) -> None:
        """A backward without a step since the last one adds up: let what is owned count in full, the rest not at all.

        The next mean divides by the number of ranks, and only the owner has the gradient of before. Gradients that were
        cleared or changed since they were delivered start anew.
        """
        for parameter in self.context.names:
            gradient = parameter.grad
            if gradient is not None and self._versions.get(id(parameter)) == gradient._version:
                start, stop = self._ownership.range(parameter)
                flat = gradient.detach().view(-1)
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
        self._full_state = None
        if self._stepped_in_backward and self._stepping is None:
            self._refuse_changed_gradients()
        self._swapped = [(group, group["params"]) for group in optimizer.param_groups]
        for group, parameters in self._swapped:
            parts = []
            for parameter in parameters:
                part = self._part_for_step(parameter)
                if part is not None:
                    parts.append(part)
                if part is not parameter and parameter in optimizer.state:
                    optimizer.state[self._shard(parameter)] = optimizer.state.pop(parameter)
            group["params"] = parts

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = []
        for group, parameters in self._swapped:
            group["params"] = parameters
            for parameter in parameters:
                if self._steps_with(parameter):
                    stepped.append(parameter)
                self._versions.pop(id(parameter), None)
                shard = self._shards.get(id(parameter))
                if shard is not None:
                    shard.grad = None
                    if shard in optimizer.state:
                        optimizer.state[parameter] = optimizer.state.pop(shard)
        self._swapped = []
        self._gather(sorted(stepped, key=lambda p: self._order[id(p)]))
        if self._stepping is None:
            self._stepped_in_backward = False

    def _step_now(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Step inside backward, with the gradients that have arrived; the step that the loop takes later does nothing."""
        self._stepping = {id(parameter): part for parameter, part in pairs}
        for optimizer in self._optimizers:
            optimizer.step()
        self._stepping = None
        self._stepped_in_backward = True

    def _part_for_step(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the optimizer steps with in place of a parameter: the owned part, or nothing."""
        if id(parameter) not in self._order:
            return parameter if self._stepping is None else None
        if not self._steps_with(parameter):
            return None
        shard = self._shard(parameter)
        if self._stepping is not None:
            gradient = self._stepping[id(parameter)]
        else:
            start, stop = self._ownership.range(parameter)
            gradient = parameter.grad.detach().view(-1)[start:stop]  # type: ignore[union-attr]
        shard.grad = gradient.to(shard.dtype)
        return shard if shard.numel() else None

    def _steps_with(self, parameter: torch.Tensor) -> bool:
        if id(parameter) not in self._order or not parameter.requires_grad:
            return False
        if self._stepping is not None:
            return id(parameter) in self._stepping
        return not self._stepped_in_backward and parameter.grad is not None

    def _shard(self, parameter: torch.Tensor) -> torch.nn.Parameter:
        """A view of the owned part, or a master copy of it where the wire is narrow."""
        if id(parameter) not in self._shards:
            start, stop = self._ownership.range(parameter)
            own = parameter.detach().view(-1)[start:stop]
            if self._wire_dtype is not None:
                master = self._loaded_masters.pop(self.context.names[parameter], own)
                own = master.to(device=own.device, dtype=torch.promote_types(own.dtype, torch.float32), copy=True)
            self._shards[id(parameter)] = torch.nn.Parameter(own, requires_grad=True)
        return self._shards[id(parameter)]

    def _note_gradients(self) -> None:
        self._versions = {id(p): p.grad._version for p in self.context.names if p.grad is not None}

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
                flat[start:stop].copy_(self._shard(parameter).detach())
            pairs.append((parameter, flat))
            size += flat.numel() * flat.element_size()
            following = parameters[index + 1] if index + 1 < len(parameters) else None
            if size >= GATHER_BYTES or following is None or following.dtype != parameter.dtype:
                self._start_gather(pairs)
                pairs, size = [], 0
        if self._arriving and self._end_guard is None:
            self._end_guard = seams.guard_parameters(self.context.module, self._finish)

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

    # Checkpoints: optimizers look whole from outside.

    def _divide_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the owned part of a state that was loaded, or made before this hook was attached."""
        self._full_state = None
        for parameter, state in optimizer.state.items():
            if id(parameter) in self._order:
                start, stop = self._ownership.range(parameter)
                for key, value in state.items():
                    if _is_whole(key, value, parameter):
                        state[key] = value.detach().reshape(-1)[start:stop].clone()

    def prepare_save(self) -> None:
        """Gather the optimizers' whole state on the ranks that may write it; one tensor in flight at a time."""
        self.synchronize()
        writes = self.comm.rank in self.comm.topology.leaders
        self._full_state = {id(optimizer): self._whole_state(optimizer, keep=writes) for optimizer in self._optimizers}

    def _whole_state(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[int, dict[str, Any]]:
        """The state of every parameter with all its elements, on the CPU; empty where ``keep`` is False."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._order]
        # A rank that owns nothing of a small parameter has no state for it, so the ranks tell each other what there is.
        divided, plain = zip(*(self._split_state(optimizer, p) for p in parameters), strict=True)
        everyone = self.comm.gather_objects((divided, plain))
        whole: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(parameters):
            kinds: dict[str, torch.dtype] = next((d[index] for d, _ in everyone if d[index]), {})
            counters = next((p[index] for d, p in everyone if d[index]), plain[index])
            whole[id(parameter)] = dict(counters) if keep else {}
            for key, dtype in kinds.items():
                own = torch.empty(0, dtype=dtype, device=parameter.device)
                if key in divided[index]:
                    own = optimizer.state[parameter][key]
                gathered = self._ownership.gather_one(own, parameter)
                if keep:
                    whole[id(parameter)][key] = gathered.cpu()
        return whole

    def _split_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[dict, dict]:
        """(types of what is divided, the rest: counters and the like) of one parameter's state on this rank."""
        start, stop = self._ownership.range(parameter)
        state = optimizer.state.get(parameter, {})
        divided = {
            k: v.dtype for k, v in state.items() if torch.is_tensor(v) and stop > start and v.shape == (stop - start,)
        }
        return dict(sorted(divided.items())), {k: v for k, v in state.items() if k not in divided}

    def _state_dict_of(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in self._order and p in optimizer.state for p in parameters):
            return state_dict
        if self._full_state is None or id(optimizer) not in self._full_state:
            raise CompatibilityError(
                "the optimizer's state is divided among the ranks, and state_dict() on one rank cannot gather it; call "
                "handle.prepare_save() on every rank first (accelerator.save_state and Trainer do so by themselves)"
            )
        whole = self._full_state[id(optimizer)]
        state = dict(state_dict["state"])
        for index, parameter in enumerate(parameters):
            if id(parameter) in whole:
                state.pop(index, None)
                if whole[id(parameter)]:
                    state[index] = whole[id(parameter)]
        return {**state_dict, "state": dict(sorted(state.items()))}

    def state_dict(self) -> State:
        masters = {}
        if self._wire_dtype is not None:
            masters = {
                name: self._shards[id(p)].detach().clone()
                for p, name in self.context.names.items()
                if id(p) in self._shards
            }
        return {**super().state_dict(), "masters": {**self._loaded_masters, **masters}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._loaded_masters = dict(state["masters"])
        if self._wire_dtype is not None:
            self._shards.clear()

    def merge_states(self, states: Iterable[State]) -> State:
        """Masters of all ranks, put together and cut anew."""
        merged: State = {}
        parts: dict[str, list[torch.Tensor]] = {}
        for state in states:
            merged = merged or state
            for name, part in state["masters"].items():
                parts.setdefault(name, []).append(part)
        masters = {}
        for parameter, name in self.context.names.items():
            if name in parts:
                start, stop = self._ownership.range(parameter)
                masters[name] = torch.cat(parts[name])[start:stop].clone()
        return {**merged, "masters": masters}

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
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            whole = self._whole_state(optimizer, keep=True)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if whole.get(id(parameter)):
                        optimizer.state[parameter] = {
                            key: value.to(parameter.device) if _is_whole(key, value, parameter) else value
                            for key, value in whole[id(parameter)].items()
                        }


def _is_whole(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state tensor has an element for each of the parameter's, and is not a counter."""
    if not torch.is_tensor(value) or value.shape != parameter.shape:
        return False
    return value.numel() > 1 or (parameter.ndim == 0 and key != "step")


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

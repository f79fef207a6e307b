"""Plain averaging in 8-bit digits with error feedback: a quarter of DDP's bytes.

What rounding took of a rank's gradient is added to its next one, so that nothing is lost: for the mean over ranks,
``gradient + residual before = result + residual after``, before a result is rounded to a gradient's own type. Residuals belong to
parameters, by name, and are at least float32 in unscaled gradient units. If a result is not finite, which is so on all ranks,
every rank keeps its residuals as they were.

Gradients travel in parcels (parcels.py), each sent as soon as DDP has handed over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.cost import Prediction, Problem, mean_over_ranks
from ..comm.hierarchy import MeanOverRanks
from ..comm.pending import PendingResult
from ..comm.process_group import GradBucket
from ..config.registry import register_hook
from ..upstream import foreach
from .base import CommHook, HookContext, State, new_future
from .host import on_host
from .memory import Memory, with_mean_residuals
from .parcels import Parcel, parcels

PARCEL_NUMBERS = 2 * 2**20
"""Few enough for parcels to travel during backward, and enough to be worth their kernels."""
FIRST_NUMBERS = 2**18
"""In the first one: as many as in DDP's first bucket, so that it leaves early."""


def in_parcels(sizes: Sequence[int]) -> list[Parcel]:
    """Gradients of these sizes, in the model's order, as they travel."""
    return parcels(sizes, PARCEL_NUMBERS, first=FIRST_NUMBERS)


@dataclass(eq=False)
class Shipment:
    """A parcel of gradients: what is kept of it from step to step, and what this step knows of it."""

    parcel: Parcel
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    error: torch.Tensor
    """What rounding took in the step before."""
    missing: int = 0
    """Gradients that have not been handed over in this step."""
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    lost: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    flags: torch.Tensor | None = None
    """One for each parameter, above zero where some rank had a gradient; only where DDP looks for unused parameters."""
    pending: list[PendingResult] = field(default_factory=list)

    def views(self, of: torch.Tensor) -> list[torch.Tensor]:
        return [part.of(of) for part in self.parcel.parts]

    def forget(self) -> None:
        """Let go of what belongs to this step."""
        self.values = self.lost = self.error.new_empty(0)
        self.pending, self.flags = [], None

    def errors(self) -> list[torch.Tensor]:
        return [self.error]

    def remembered(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, view in zip(self.names, self.views(self.error), strict=True):
            yield "error", name, view


@register_hook("int8_compress", aliases=("int8",))
class Int8CompressHook(CommHook):
    """Averages gradients in int8 with error feedback: a quarter of DDP's bytes."""

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction:
        """A byte and a 64th for each number, and twice (W - 1) / W of them, like a ring."""
        sizes = [math.prod(shape) for _, shape in problem.parameters if math.prod(shape)]
        cost = Prediction()
        for parcel in in_parcels(sizes):
            cost += mean_over_ranks(problem, parcel.numel, cls.wire_dtype(options))
        return cost

    @classmethod
    def wire_dtype(cls, options: Any) -> str:
        return "int8"

    def __init__(self, options: Any, context: HookContext):
        super().__init__(options, context)
        self._mean = MeanOverRanks(self.comm, torch.int8)
        self._memory = Memory("error")
        self._shipments: list[Shipment] = []
        self._of: dict[torch.Tensor, Shipment] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        """Of this backward, flat, in DDP's buckets."""
        self._buckets: list[tuple[GradBucket, torch.futures.Future]] = []
        self._sent: list[Shipment] = []

    # Backward.

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = new_future(bucket.buffer().device)
        self._buckets.append((bucket, future))
        parameters = bucket.parameters()
        gradients = bucket.buffer().split([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._gradients[parameter] = gradient
            shipment = self._of.get(parameter)
            if shipment is not None:
                shipment.missing -= 1
                if not shipment.missing:
                    self._send(shipment)
        if bucket.is_last():
            self._finish()
        return future

    def _send(self, shipment: Shipment) -> None:
        """M = gradient + residual, on its way."""
        self._sent.append(shipment)
        make = torch.zeros_like if shipment.parcel.is_padded else torch.empty_like
        shipment.values = values = make(shipment.error)
        gradients = [self._gradients[parameter] for parameter in shipment.parameters]
        foreach.copy(shipment.views(values), gradients)
        scale = self.context.loss_scale(values.device)
        if scale is not None:
            values.div_(scale)
        if self.context.finds_unused:
            shipment.flags = (foreach.largest(gradients) != 0).to(values.dtype)  # a NaN is not zero
            shipment.pending.append(self.comm.all_reduce(shipment.flags))
        values.add_(shipment.error)
        shipment.lost = torch.empty_like(values)
        shipment.pending.append(self._mean(values, shipment.lost))

    def _finish(self) -> None:
        if not self._shipments:
            self._pack()
        for shipment in self._sent:
            for pending in shipment.pending:
                pending.wait()
        self._deliver()
        self._keep_residuals()
        buckets = self._buckets
        self._begin_anew()
        for bucket, future in buckets:
            future.set_result(bucket.buffer())

    def _pack(self) -> None:
        """The first backward shows which parameters DDP reduces, so all of them travel at its end."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.context.names:
            if parameter in self._gradients and parameter.numel():
                dtype = torch.promote_types(self._gradients[parameter].dtype, torch.float32)
                by_type.setdefault(dtype, []).append(parameter)
        for dtype, parameters in by_type.items():
            for parcel in in_parcels([p.numel() for p in parameters]):
                members = tuple(parameters[part.index] for part in parcel.parts)
                error = torch.zeros(parcel.numel, dtype=dtype, device=members[0].device)
                shipment = Shipment(parcel, members, tuple(self.context.names[p] for p in members), error)
                self._memory.move_into(shipment)
                self._shipments.append(shipment)
                self._of.update(dict.fromkeys(members, shipment))
                self._send(shipment)

    def _deliver(self) -> None:
        """Write the means into DDP's buckets. A parameter that no rank used keeps its residual, so none of it is in its mean."""
        for shipment in self._sent:
            if shipment.flags is not None:
                for used, value in zip(shipment.flags > 0, shipment.views(shipment.values), strict=True):
                    value.mul_(used)
            scale = self.context.loss_scale(shipment.values.device)
            if scale is not None:
                shipment.values.mul_(scale)
            targets = [self._gradients[parameter] for parameter in shipment.parameters]
            foreach.copy(targets, shipment.views(shipment.values))

    def _keep_residuals(self) -> None:
        """What was lost, unless something that was delivered is not finite, and not where no rank used a parameter."""
        if not self._sent:
            return
        delivered = [bucket.buffer() for bucket, _ in self._buckets if bucket.buffer().numel()]
        fine = foreach.largest(delivered).amax() < math.inf
        for shipment in self._sent:
            self._memory.before_change(shipment)
            if shipment.flags is not None:
                parts = (shipment.flags > 0, shipment.views(shipment.lost), shipment.views(shipment.error))
                for used, lost, error in zip(*parts, strict=True):
                    torch.where(fine & used, lost, error, out=error)
            elif not on_host(fine):
                torch.where(fine, shipment.lost, shipment.error, out=shipment.error)
            elif fine:
                shipment.error.copy_(shipment.lost)
            shipment.forget()

    def _begin_anew(self) -> None:
        self._buckets, self._gradients, self._sent = [], {}, []
        for shipment in self._shipments:
            shipment.missing = len(shipment.parameters)

    def abandon_backward(self) -> None:
        for shipment in self._sent:
            shipment.forget()
        self._begin_anew()

    # The step.

    def step_done(self, *, weights_in_use: bool = False) -> None:
        super().step_done(weights_in_use=weights_in_use)
        self._memory.commit()

    def discard(self, kept: torch.Tensor | None) -> None:
        self._memory.roll_back(kept)

    # Checkpoints.

    def state_dict(self) -> State:
        return {**super().state_dict(), **self._memory.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._memory.load_state_dict(state)
        self._shipments, self._of = [], {}

    def merge_states(self, states: Iterable[State]) -> State:
        """Every new rank gets the mean residual, so that their mean stays what it was."""
        return with_mean_residuals(states)

"""The batched_powersgd hook: the whole gradient is compressed as one square matrix."""

from __future__ import annotations

from typing import Any

import torch

from ...comm.cost import Prediction, Problem
from ...comm.pending import PendingResult
from ...comm.process_group import GradBucket
from ...config.registry import register_hook
from ...upstream import foreach
from ..base import HookContext
from .cost import batched_powersgd_cost
from .lowrank import square_side
from .options import LowRankOptions
from .stages import LowRankHook
from .units import Matrix, Unit


@register_hook("batched_powersgd", aliases=("batched_power_sgd",))
class BatchedPowerSGDHook(LowRankHook):
    """PowerSGD on the whole gradient as one square matrix: fewest bytes and calls, a coarser approximation.

    torch makes one square of each bucket. Buckets are rebuilt after the first step, so a resumed run would differ from an
    uninterrupted one. One square of all parameters, in the model's order, does not depend on buckets.
    """

    Options = LowRankOptions
    _NAME = "(all parameters)"

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction | None:
        return batched_powersgd_cost(options, problem)

    def __init__(self, options: LowRankOptions, context: HookContext):
        super().__init__(options, context)
        self._arrived: list[tuple[GradBucket, torch.futures.Future, PendingResult | None]] = []

    def enqueue(self, bucket: GradBucket, future: torch.futures.Future) -> None:
        inside = self._nodes.inside(bucket.buffer()) if self._nodes is not None else None
        self._arrived.append((bucket, future, inside))
        if not bucket.is_last():
            return
        arrived, self._arrived = self._arrived, []
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for each, _, waiting in arrived:
            if waiting is not None:
                waiting.wait()
            gradients.update(zip(each.parameters(), each.gradients(), strict=True))
        ordered = [(name, gradients[p]) for p, name in self.context.names.items() if p in gradients]
        unit = self.unit(tuple(id(p) for p in gradients), lambda: self._build(ordered))
        unit.m = torch.zeros(unit.numel, dtype=unit.flat.dtype, device=unit.flat.device)
        foreach.copy(self._parts(unit), [gradient.reshape(-1) for _, gradient in ordered])
        unit.deliver = lambda: self._deliver(unit, ordered, arrived)
        self._in_flight.append(unit)
        self.first_stage(unit)

    def abandon_backward(self) -> None:
        super().abandon_backward()
        self._arrived = []

    @staticmethod
    def _parts(unit: Unit) -> list[torch.Tensor]:
        """Each parameter's part of the square."""
        return [unit.m[offset : offset + length] for _, offset, length in unit.residuals]

    @staticmethod
    def _deliver(unit: Unit, ordered: list, arrived: list) -> None:
        parts = [part.view_as(g) for part, (_, g) in zip(BatchedPowerSGDHook._parts(unit), ordered, strict=True)]
        foreach.copy([gradient for _, gradient in ordered], parts)
        for error in unit.errors():
            _, offset, length = unit.residuals[-1]
            error.view(-1)[offset + length :].zero_()  # the padding of the square belongs to no parameter
        unit.m = unit.flat
        for bucket, future, _ in arrived:
            future.set_result(bucket.buffer())

    def _build(self, ordered: list[tuple[str, torch.Tensor]]) -> Unit:
        residuals, offset = [], 0
        for name, gradient in ordered:
            residuals.append((name, offset, gradient.numel()))
            offset += gradient.numel()
        side = square_side(offset)
        rank = min(side, self.options.rank)
        return Unit.allocate(
            side * side,
            [Matrix(self._NAME, 0, side, side, rank)],
            [],
            residuals,
            like=ordered[0][1],
            draw=self.draw,
            keeps_p=self.options.alternate,
            keeps_error=self.options.use_error_feedback,
        )

"""The powersgd hook: every matrix is compressed by itself, bucket by bucket."""

from __future__ import annotations

from typing import Any

import torch

from ...comm.cost import Prediction, Problem
from ...comm.process_group import GradBucket
from ...config.registry import register_hook
from .cost import powersgd_cost
from .options import PowerSGDOptions
from .stages import LowRankHook
from .units import Matrix, Unit


@register_hook("powersgd", aliases=("power_sgd",))
class PowerSGDHook(LowRankHook):
    """Low-rank compression with error feedback: a few percent of DDP's bytes."""

    Options = PowerSGDOptions

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction | None:
        return powersgd_cost(options, problem)

    def enqueue(self, bucket: GradBucket, future: torch.futures.Future) -> None:
        """One unit per bucket. In node scope a unit continues when the next bucket arrives: by then its node has averaged it."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        unit = self.unit(tuple(map(id, parameters)), lambda: self._build(parameters, buffer))
        self._in_flight.append(unit)
        unit.deliver = lambda: self._deliver(unit, buffer, future)
        unit.m = _in_math_dtype(buffer)
        if self._nodes is None:
            self.first_stage(unit)
            return
        unit.pending = [self._nodes.inside(unit.m)]
        if len(self._in_flight) > 1:
            self.first_stage(self._in_flight[-2])

    @staticmethod
    def _deliver(unit: Unit, buffer: torch.Tensor, future: torch.futures.Future) -> None:
        if unit.m.data_ptr() != buffer.data_ptr():
            buffer.copy_(unit.m)
        unit.m = unit.flat
        future.set_result(buffer)

    def _build(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> Unit:
        matrices, vectors, offset = [], [], 0
        for parameter in parameters:
            name, numel = self.context.names[parameter], parameter.numel()
            rows, columns, rank = self.options.matrix_of(name, parameter.shape)
            if rank:
                matrices.append(Matrix(name, offset, rows, columns, rank))
            elif numel:
                vectors.append((offset, numel))
            offset += numel
        return Unit.allocate(
            offset,
            matrices,
            vectors,
            [(matrix.name, matrix.offset, matrix.rows * matrix.columns) for matrix in matrices],
            like=buffer,
            draw=self.draw,
            keeps_p=self.options.alternate,
            keeps_error=self.options.use_error_feedback,
        )


def _in_math_dtype(gradient: torch.Tensor) -> torch.Tensor:
    """At least float32: half precision is not enough for products and residuals."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))

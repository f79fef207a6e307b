"""PowerSGD with what did not earn a place in the package, for a table in docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from accel_commhooks import option
from accel_commhooks.comm import quantised
from accel_commhooks.hooks.powersgd.hook import PowerSGDHook
from accel_commhooks.hooks.powersgd.options import PowerSGDOptions
from accel_commhooks.hooks.powersgd.units import Matrix, Unit


@dataclass(kw_only=True)
class VariantOptions(PowerSGDOptions):
    largest_rows: int = option(0, "So many rows of the embedding, the largest ones, travel whole.", at_least=0)
    digits: int = option(127, "The largest digit: 7 has the precision of int4, and the bytes of int8 here.", at_least=1)
    decay: float = option(1.0, "Residuals are multiplied by it in each step.", above=0)


class VariantHook(PowerSGDHook):
    Options = VariantOptions

    def __init__(self, options: VariantOptions, context):
        super().__init__(options, context)
        quantised._LARGEST_DIGIT = options.digits

    def first_stage(self, unit: Unit) -> None:
        for error in unit.errors():
            error.mul_(self.options.decay)
        if self.options.largest_rows:
            for index, matrix in enumerate([matrix for run in unit.runs for matrix in run.matrices]):
                if "wte" in matrix.name:
                    self._send_rows(unit, matrix, unit.errors()[index])
        super().first_stage(unit)

    def _send_rows(self, unit: Unit, matrix: Matrix, error: torch.Tensor) -> None:
        """The rows of gradient + residual that are the largest on average travel as they are; the rest is compressed."""
        gradient = matrix.view(unit.m)
        whole = gradient + error
        norms = whole.norm(dim=1)
        self.comm.all_reduce(norms).wait()
        rows = norms.topk(self.options.largest_rows).indices
        sent = whole[rows]
        self.comm.all_reduce(sent).wait()
        gradient[rows] = 0.0
        error[rows] = 0.0
        unit.deliver = partial(_add_rows, unit, matrix, rows, sent, unit.deliver)


def _add_rows(unit: Unit, matrix: Matrix, rows: torch.Tensor, sent: torch.Tensor, deliver: Callable[[], None]) -> None:
    matrix.view(unit.m)[rows] += sent
    deliver()

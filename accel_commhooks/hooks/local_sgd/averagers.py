"""torch's model averagers, in place: for hand-written loops, and wherever torch's own are accepted.

torch's copy the whole model into one flat tensor and leave every parameter as a view of it, and they skip parameters whose
``.grad`` is None. These write the mean back where it came from, and average whatever requires a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...comm.collectives import Communicator
from ...comm.process_group import ModelAverager, ProcessGroup
from ...config.errors import ConfigError
from .averaging import average_in_place
from .schedule import HierarchicalSchedule, PeriodicSchedule, Schedule


class PeriodicModelAverager(ModelAverager):
    """torch's PeriodicModelAverager, in place. For hand-written loops: ``average_parameters`` after each step."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None):
        super().__init__(process_group)
        if period < 1 or warmup_steps < 0:
            raise ConfigError(
                f"period must be at least 1 and warmup_steps at least 0, but got {period} and {warmup_steps}"
            )
        self.comm = Communicator(process_group)
        self._schedule: Schedule = PeriodicSchedule(self.comm, period, warmup_steps)

    def average_parameters(self, params: Iterable) -> None:
        """Average what requires gradients, if this step is one to average after; then count the step."""
        group = self._schedule.group_at(self.step)
        if group is not None:
            average_in_place(self.comm, _parameters_of(params), group=group)
        self.step += 1


class HierarchicalModelAverager(PeriodicModelAverager):
    """torch's HierarchicalModelAverager, in place."""

    def __init__(
        self,
        period_group_size_dict: dict[int, int],
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__(1, warmup_steps, process_group)
        self._schedule = HierarchicalSchedule(self.comm, period_group_size_dict, warmup_steps)


def _parameters_of(params: Iterable) -> list[torch.Tensor]:
    """Trainable parameters from what torch's averagers accept: parameters, or an optimizer's parameter groups."""
    found: list[torch.Tensor] = []
    for item in params:
        found.extend(item["params"] if isinstance(item, dict) else [item])
    return [parameter for parameter in found if parameter.requires_grad]

"""When replicas are averaged, and among whom: the schedules of torch's averagers."""

from __future__ import annotations

from ...comm.collectives import Communicator
from ...comm.survivors import Group
from ...config.errors import ConfigError


class Schedule:
    """When to average, and among whom."""

    def group_at(self, step: int) -> Group | None:
        """The group to average over after the ``step``-th step (from 0), or None."""
        raise NotImplementedError


class PeriodicSchedule(Schedule):
    """torch's PeriodicModelAverager: every ``period`` steps from ``warmup_steps`` on, among everyone."""

    def __init__(self, comm: Communicator, period: int, warmup_steps: int):
        self._comm, self._period, self._warmup = comm, period, warmup_steps

    def group_at(self, step: int) -> Group | None:
        due = step >= self._warmup and (step - self._warmup) % self._period == 0
        return self._comm.everyone if due else None


class HierarchicalSchedule(Schedule):
    """torch's HierarchicalModelAverager: of the periods that divide the step, the longest decides the group."""

    def __init__(self, comm: Communicator, period_group_size: dict[int, int], warmup_steps: int):
        self._warmup = warmup_steps
        periods, sizes = list(period_group_size), list(period_group_size.values())
        rule = "period_group_size must map rising periods to rising group sizes"
        if not periods or periods != sorted(set(periods)) or sizes != sorted(set(sizes)) or periods[0] < 1:
            raise ConfigError(f"{rule}, for example {{2: 4, 16: 32}}, but got {period_group_size}")
        if sizes[-1] != comm.size or any(comm.size % size for size in sizes):
            raise ConfigError(
                f"{rule} that divide the number of ranks, the last one being all of them, but got {period_group_size} "
                f"on {comm.size} ranks"
            )
        self._groups = {
            period: comm.everyone
            if size == comm.size
            else comm.subgroup([range(first, first + size) for first in range(0, comm.size, size)])
            for period, size in period_group_size.items()
        }

    def group_at(self, step: int) -> Group | None:
        if step < self._warmup:
            return None
        return next((group for period, group in reversed(self._groups.items()) if step % period == 0), None)

"""Options of local SGD: when replicas are averaged and what happens then, and those of the hook."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...comm.wire import wire_dtype_option
from ...config.errors import ConfigError, nearest, shown
from ...config.options import HookOptions, option

_OUTER_DEFAULTS = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}


def _is_outer(value: dict) -> str | None:
    for key in value:
        if key not in _OUTER_DEFAULTS:
            return f"outer has the keys name, lr and momentum, but got {shown(key)}{nearest(str(key), _OUTER_DEFAULTS)}"
    filled = {**_OUTER_DEFAULTS, **value}
    if filled["name"] not in ("sgd", "nesterov"):
        return f"outer.name must be one of sgd, nesterov, but got {shown(filled['name'])}"
    for key, low, high in (("lr", 0.0, float("inf")), ("momentum", 0.0, 1.0)):
        number = filled[key]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not low <= number < high:
            return f"outer.{key} must be a number of at least {low:g} and below {high:g}, but got {shown(number)}"
    return None


def _is_hierarchy(value: dict) -> str | None:
    if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for pair in value.items() for n in pair):
        return None
    return f"period_group_size must map whole numbers to whole numbers, for example {{2: 4, 16: 32}}, but got {shown(value)}"


@dataclass(kw_only=True)
class AveragingOptions(HookOptions):
    period: int = option(8, "Optimizer steps between two averagings.", at_least=1)
    warmup_steps: int | None = option(0, "Steps before the first averaging.", at_least=0, delays_start=True)
    period_group_size: dict = option(
        {}, "Averaging in levels, in place of period: {2: 4, 16: 32} means every 2 steps among 4 ranks, every 16 among 32.",
        check=_is_hierarchy,
    )  # fmt: skip
    averager: Any = option(None, "A torch ModelAverager to run instead (from Python only).")
    buffers: str = option(
        "average",
        "Floating-point buffers (batch norm) at an averaging: average, keep, or broadcast rank 0's.",
        choices=("average", "keep", "broadcast"),
    )
    outer: dict = option(
        {}, "Optimizer on the averaged change: {name: sgd | nesterov, lr: 0.7, momentum: 0.9}; empty means a plain mean.",
        check=_is_outer,
    )  # fmt: skip
    wire_dtype: str | None = wire_dtype_option(
        "Type in which changes since the last averaging travel: fp16, bf16 or int8."
    )
    optimizer_state: str = option(
        "keep",
        "The inner optimizer's moments at an averaging: keep, average or reset.",
        choices=("keep", "average", "reset"),
    )
    overlap_steps: int = option(0, "Steps over which an averaging may travel in the background.", at_least=0)
    restore_local: bool = option(False, "Put each rank's own weights back after an evaluation or a save.")

    def check(self) -> None:
        if self.overlap_steps >= self.period and not self.period_group_size:
            raise ConfigError(
                f"overlap_steps must be below period, so that an averaging arrives before the next one starts, but got "
                f"{self.overlap_steps} and {self.period}"
            )
        if self.overlap_steps and (self.period_group_size or self.averager is not None):
            raise ConfigError(
                f"overlap_steps works with one period for all ranks, but got {self.overlap_steps} beside "
                f"{'averager' if self.averager is not None else 'period_group_size'}; set overlap_steps: 0"
            )
        if self.averager is not None and not hasattr(self.averager, "average_parameters"):
            raise ConfigError(
                f"averager must be a torch ModelAverager, but got {shown(self.averager)}; from YAML use period and warmup_steps"
            )

    def cycle(self) -> int:
        return math.lcm(*(self.period_group_size or {self.period: None}))

    def lead(self) -> int:
        return self.cycle() if self.overlap_steps else 1

    def averages_changes(self) -> bool:
        """Whether changes since the last averaging are sent, not weights; this keeps an anchor.

        A wire_dtype needs changes: weights would lose too many digits.
        """
        return bool(self.outer) or self.wire_dtype is not None or self.overlap_steps > 0

    def outer_optimizer(self) -> tuple[float, float, bool]:
        """(learning rate, momentum, whether it is Nesterov's) of the optimizer on the averaged change."""
        if not self.outer:
            return 1.0, 0.0, False
        outer = {**_OUTER_DEFAULTS, **self.outer}
        return outer["lr"], outer["momentum"], outer["name"] == "nesterov"


def _is_subgroup(value: str | list) -> str | None:
    if value in ("node", "none"):
        return None
    if isinstance(value, list) and value and all(isinstance(ranks, list) and ranks for ranks in value):
        flat = [rank for ranks in value for rank in ranks]
        # The type first: text has no order, and true would count as 1.
        if all(type(rank) is int for rank in flat) and sorted(flat) == list(range(len(flat))):
            return None
    return f"subgroup must be node, none, or lists that hold every rank once, like [[0, 1], [2, 3]], but got {shown(value)}"


@dataclass(kw_only=True)
class PostLocalSGDOptions(AveragingOptions):
    start_localSGD_iter: int = option(
        100, "Optimizer steps of plain DDP before local steps start.", at_least=0, delays_start=True
    )
    post_local_gradient_allreduce: bool = option(True, "Average gradients inside the subgroup at local steps.")
    subgroup: str | list = option(
        "node", "Who averages gradients at local steps: node, none, or lists of ranks.", check=_is_subgroup
    )
    warmup_steps: int | None = option(
        None, "Steps before the first averaging; start_localSGD_iter when not given.", at_least=0, delays_start=True
    )

    def check(self) -> None:
        if self.warmup_steps is None:
            self.warmup_steps = self.start_localSGD_iter
        super().check()

"""The plain hooks: DDP's own averaging, the same in half the bytes, and none at all.

``allreduce`` divides, then sums, as DDP does without a hook, so its results are DDP's. ``fp16_compress`` and
``bf16_compress`` narrow what travels and run on Gloo as well as NCCL. ``noop`` sends nothing. It is the speed limit that
every other hook is measured against; it does not train one model but as many as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..comm.cost import Prediction, Problem, all_reduce_gradients
from ..comm.hierarchy import MeanOverRanks
from ..comm.process_group import GradBucket
from ..comm.wire import wire_dtype_named, wire_dtype_option
from ..config.errors import ConfigError
from ..config.options import HookOptions, option
from ..config.registry import register_hook
from .base import HookContext, QueueHook


@dataclass(kw_only=True)
class AllReduceOptions(HookOptions):
    wire_dtype: str | None = wire_dtype_option("Type in which gradients travel: fp16, bf16 or int8.")


@register_hook("allreduce", aliases=("no",))
class AllReduceHook(QueueHook):
    """Averages gradients as plain DDP does."""

    Options: ClassVar[type[HookOptions]] = AllReduceOptions
    equals_ddp = True
    plain_tensors_only = False
    allows_repeated_closures = True

    def __init__(self, options: HookOptions, context: HookContext):
        super().__init__(options, context)
        self._mean = MeanOverRanks(self.comm, wire_dtype_named(self.wire_dtype(options)))

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction:
        """2 (W - 1) / W x N, in one all-reduce per bucket, like DDP; less of it with wire_dtype."""
        return all_reduce_gradients(problem, cls.wire_dtype(options))

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        buffer = bucket.buffer()
        pending = self._mean(buffer)

        def finish() -> torch.Tensor:
            pending.wait()
            return buffer

        return finish


@register_hook("fp16_compress", aliases=("fp16",))
class Fp16CompressHook(AllReduceHook):
    """Averages gradients in float16: half of DDP's bytes."""

    Options = HookOptions

    @classmethod
    def wire_dtype(cls, options: Any) -> str:
        return "fp16"


@register_hook("bf16_compress", aliases=("bf16",))
class Bf16CompressHook(AllReduceHook):
    """Averages gradients in bfloat16: half of DDP's bytes, float32's range."""

    Options = HookOptions

    @classmethod
    def wire_dtype(cls, options: Any) -> str:
        return "bf16"


@dataclass(kw_only=True)
class NoopOptions(HookOptions):
    i_know_that_replicas_diverge: bool = option(
        False, "Must be true: without communication every rank trains a model of its own."
    )

    def check(self) -> None:
        if not self.i_know_that_replicas_diverge:
            raise ConfigError(
                "noop averages nothing, so every rank would train a model of its own; for a measurement of the speed "
                "limit set i_know_that_replicas_diverge: true, for training use name: allreduce"
            )


@register_hook("noop")
class NoopHook(QueueHook):
    """Sends nothing: the speed limit, for measurements only."""

    Options = NoopOptions
    plain_tensors_only = False
    allows_repeated_closures = True
    replicas_agree = False
    bench_options = {"i_know_that_replicas_diverge": True}

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction:
        return Prediction()

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        return bucket.buffer

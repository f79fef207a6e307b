"""The plain hooks: DDP's own averaging, the same in half the bytes, and none at all.

``allreduce`` divides, then sums, as DDP does without a hook, so its results are DDP's. ``fp16_compress`` and
``bf16_compress`` narrow what travels and run on Gloo as well as NCCL. ``noop`` sends nothing: it is the speed limit
that every other hook is measured against, and it does not train one model but as many as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config.errors import ConfigError
from ..config.options import HookOptions, option
from ..config.registry import register_hook
from .base import QueueHook


@register_hook("allreduce", aliases=("no",))
class AllReduceHook(QueueHook):
    """Averages gradients as plain DDP does."""

    wire_dtype: torch.dtype | None = None

    def start(self, bucket: dist.GradBucket) -> Callable[[], torch.Tensor]:
        return self.comm.all_reduce(bucket.buffer(), wire_dtype=self.wire_dtype).wait


@register_hook("fp16_compress", aliases=("fp16",))
class Fp16CompressHook(AllReduceHook):
    """Averages gradients in float16: half of DDP's bytes."""

    wire_dtype = torch.float16


@register_hook("bf16_compress", aliases=("bf16",))
class Bf16CompressHook(AllReduceHook):
    """Averages gradients in bfloat16: half of DDP's bytes, float32's range."""

    wire_dtype = torch.bfloat16


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

    def start(self, bucket: dist.GradBucket) -> Callable[[], torch.Tensor]:
        return bucket.buffer

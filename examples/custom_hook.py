"""A hook of your own: each gradient travels as signs, one byte per value and one scale per bucket (signSGD).

configs/custom_hook.yaml names the class as ``custom_hook:SignHook``; this folder must be on PYTHONPATH, or the script in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from accel_commhooks import HookOptions, option
from accel_commhooks.comm.cost import Prediction, Problem, all_reduce
from accel_commhooks.hooks.base import GradBucket, QueueHook


@dataclass(kw_only=True)
class SignOptions(HookOptions):
    warmup_steps: int = option(20, "Optimizer steps with plain averaging first.", at_least=0, delays_start=True)


class SignHook(QueueHook):
    """A fourth of DDP's bytes: the mean sign over all ranks, times the mean size of the bucket's values."""

    Options = SignOptions

    @classmethod
    def cost(cls, options: SignOptions, problem: Problem) -> Prediction:
        """A byte a value and a scale a bucket, for `accel-commhooks bench`."""
        return all_reduce(problem, problem.elements + 4, 2 * len(problem.buckets()))

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        gradient = bucket.buffer()
        if self.step < self.options.warmup_steps:
            return self.comm.all_reduce(gradient).wait
        scale = self.comm.all_reduce(gradient.abs().mean())
        votes = self.comm.all_reduce(gradient.sign().to(torch.int8), mean=False)  # a byte holds up to 127 ranks
        return lambda: gradient.copy_(votes.wait()).mul_(scale.wait() / self.comm.size)

"""Hooks of somebody else, for the tests of verify: one that keeps every promise, and some that each break one."""

import os

import torch

from accel_commhooks.comm.cost import all_reduce_gradients
from accel_commhooks.hooks.base import QueueHook, new_future
from accel_commhooks.hooks.plain import AllReduceHook


class HalfHook(QueueHook):
    """Sends every other element, and keeps the rest as a residual for the next step."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._error = {}

    @classmethod
    def cost(cls, options, problem):
        return all_reduce_gradients(problem)

    def start(self, bucket):
        named = [self.context.names[p] for p in bucket.parameters()]
        scale, buffer = self.context.loss_scale(bucket.buffer().device), bucket.buffer()
        if scale is not None:
            buffer.div_(scale)
        kept = [self._error.get(name, torch.zeros_like(g)) for name, g in zip(named, bucket.gradients(), strict=True)]
        for gradient, error in zip(bucket.gradients(), kept, strict=True):
            gradient.add_(self.taken(error))
        whole = buffer.clone()
        buffer[self.step % 2 :: 2] = 0
        buffer.add_((whole * 0).sum())  # not finite anywhere is not finite everywhere
        sent = buffer.clone()
        pending = self.comm.all_reduce(buffer)

        def finish():
            result = pending.wait()
            fine = (result * 0).sum() == 0
            rest = (whole - sent).split([gradient.numel() for gradient in kept])
            for name, old, new in zip(named, kept, rest, strict=True):
                self._error[name] = torch.where(fine, new.view_as(old), old)
            return result if scale is None else result.mul_(scale)

        return finish

    def taken(self, error):
        return error

    def state_dict(self):
        return {**super().state_dict(), "error": {name: error.clone() for name, error in self._error.items()}}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._error = dict(state["error"])


class LostResidual(HalfHook):
    """Keeps a residual, and never adds it."""

    def taken(self, error):
        return torch.zeros_like(error)


class WrongMean(AllReduceHook):
    """Forgets to divide."""

    def start(self, bucket):
        return self.comm.all_reduce(bucket.buffer(), mean=False).wait


class LocalFuture(AllReduceHook):
    """Completes the second bucket with this rank's own gradient."""

    def start(self, bucket):
        own = bucket.buffer().clone()
        finish = super().start(bucket)
        return (lambda: finish() * 0 + own) if bucket.index() == 1 else finish


class NoFuture(AllReduceHook):
    """Never completes the second bucket of the fifth step."""

    def reduce(self, bucket):
        future = super().reduce(bucket)
        return new_future(bucket.buffer().device) if self.step == 4 and bucket.index() == 1 else future


class SkipsCollective(AllReduceHook):
    """Rank 1 leaves out the last bucket of the fifth step."""

    def start(self, bucket):
        if self.step == 4 and bucket.is_last() and self.comm.rank == 1:
            return bucket.buffer
        return super().start(bucket)


class RaisesOnOneRank(AllReduceHook):
    """Rank 1 fails at the fifth step."""

    def start(self, bucket):
        if self.step == 4 and self.comm.rank == 1:
            raise RuntimeError("planted")
        return super().start(bucket)


class Dies(AllReduceHook):
    """Rank 1 dies at the fifth step."""

    def start(self, bucket):
        if self.step == 4 and self.comm.rank == 1:
            os.kill(os.getpid(), 9)
        return super().start(bucket)


class ReadsHost(AllReduceHook):
    """Looks at a value in every step."""

    def start(self, bucket):
        finish = super().start(bucket)

        def read():
            result = finish()
            assert result[0].item() is not None
            return result

        return read


class ForgetsState(HalfHook):
    """Its residual is not in a checkpoint."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "error": {}})


class StepsOnOverflow(HalfHook):
    """A rank with an infinite gradient keeps that to itself."""

    def start(self, bucket):
        bucket.buffer().nan_to_num_(0.0, 0.0, 0.0)
        return super().start(bucket)


class SendsTwice(AllReduceHook):
    """Sends more than its formula says."""

    def start(self, bucket):
        self.comm.all_reduce(bucket.buffer().clone()).wait()
        return super().start(bucket)

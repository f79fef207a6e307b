"""Ours beside what torch and Accelerate offer for the same purpose, in one interleaved run.

Runs as the ranks of a launcher, for example on a slow link::

    python benchmarks/slow_link.py --rate 200mbit -- python benchmarks/peers.py --output peers.json

Every peer is used as its own documentation says, with the settings under which it works at all here: PowerSGD with one
bucket, because with more it deadlocks on Gloo. A peer that cannot run is in the table with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from accel_commhooks.bench import models as bench_models
from accel_commhooks.bench.contenders import (
    STEPS_TO_START,
    Contender,
    Trial,
    hook_contender,
    make_ddp,
    make_optimizer,
    split_hooks,
)
from accel_commhooks.bench.report import print_table
from accel_commhooks.bench.run import Bench, add_arguments, open_ranks

PERIOD = 8
RANK = 4
ONE_BUCKET_MB = 10_000
OURS = (
    "ddp,noop,allreduce,fp16_compress,powersgd{matrix_approximation_rank: 4},"
    "powersgd{matrix_approximation_rank: 4, alternate: true},post_localsgd{period: 8},"
    "post_localsgd{period: 8, overlap_steps: 6},zero_overlap,zero_overlap{wire_dtype: bf16}"
)


def accelerate_hook(kind: DDPCommunicationHookType, bucket_cap_mb: float | None = None, **state) -> Callable:
    """What Accelerator.prepare does for DistributedDataParallelKwargs(comm_hook=kind)."""

    def build(model: torch.nn.Module) -> Trial:
        ddp = make_ddp(model, bucket_cap_mb=bucket_cap_mb)
        DistributedDataParallelKwargs(comm_hook=kind, comm_state_option=state).register_comm_hook(ddp)
        return Trial(ddp, make_optimizer(ddp))

    return build


def accelerate_local_sgd(model: torch.nn.Module) -> Trial:
    ddp = make_ddp(model)
    local = LocalSGD(Accelerator(), ddp, PERIOD)
    local.__enter__()
    return Trial(ddp, make_optimizer(ddp), on_step=local.step)


def torch_local_sgd(model: torch.nn.Module) -> Trial:
    ddp = make_ddp(model)
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, alone, STEPS_TO_START, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(PERIOD, STEPS_TO_START)
    return Trial(ddp, make_optimizer(ddp), on_step=lambda: averager.average_parameters(ddp.parameters()))


def torch_zero(model: torch.nn.Module) -> Trial:
    ddp = make_ddp(model)
    return Trial(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-4))


class ZeroHookSchedule:
    """The schedule of torch's ``hook_with_zero_step``, which itself refuses Gloo.

    Every bucket is all-reduced; after the last one, in bucket order, the rank that a bucket belongs to steps its
    parameters and broadcasts them, while the next bucket is handled.
    """

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp = ddp
        self._passes = 0
        self._pending: list[tuple[dist.GradBucket, dist.Work, torch.futures.Future]] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._load = [0] * dist.get_world_size()
        self._owners: dict[tuple[int, ...], int] = {}
        self._broadcasts: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        ddp.register_comm_hook(self, _zero_hook)

    @property
    def state(self) -> dict:
        return {p: s for optimizer in self._optimizers.values() for p, s in optimizer.state.items()}

    def add(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._pending.append((bucket, work, future))
        if bucket.is_last():
            self._step_all()
            self._passes += 1
            if self._passes == 1:  # DDP makes new buckets after the first backward; state starts over with them
                self._optimizers, self._owners, self._load = {}, {}, [0] * dist.get_world_size()
        return future

    def _step_all(self) -> None:
        pending, self._pending = self._pending, []
        for bucket, work, future in pending:
            work.wait()
            parameters = bucket.parameters()
            owner = self._owner(parameters)
            if owner == dist.get_rank():
                for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                    parameter.grad = gradient
                self._optimizer(parameters).step()
            flat = torch.cat([p.detach().view(-1) for p in parameters])
            self._broadcasts.append((dist.broadcast(flat, owner, async_op=True), flat, parameters))
            future.set_result(bucket.buffer())

    def _owner(self, parameters: list[torch.Tensor]) -> int:
        """Whole buckets, each to the rank with the least so far."""
        key = tuple(map(id, parameters))
        if key not in self._owners:
            self._owners[key] = self._load.index(min(self._load))
            self._load[self._owners[key]] += sum(p.numel() for p in parameters)
        return self._owners[key]

    def _optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        key = id(parameters[0])
        if key not in self._optimizers:
            self._optimizers[key] = torch.optim.AdamW(parameters, lr=1e-4)
        return self._optimizers[key]

    # What a training loop calls of an optimizer; the step has happened in backward.

    def step(self) -> None:
        for work, flat, parameters in self._broadcasts:
            work.wait()
            for parameter, new in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.detach().copy_(new.view_as(parameter))
        self._broadcasts = []

    def zero_grad(self) -> None:
        self._ddp.zero_grad()


def _zero_hook(schedule, bucket):  # no annotations: DDP compares them with its own classes
    return schedule.add(bucket)


def zero_hook_schedule(model: torch.nn.Module) -> Trial:
    ddp = make_ddp(model)
    schedule = ZeroHookSchedule(ddp)
    return Trial(ddp, schedule)  # type: ignore[arg-type]


def fsdp2(model: torch.nn.Module) -> Trial:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trial(model, make_optimizer(model))


PEERS = [
    Contender("Accelerate FP16", accelerate_hook(DDPCommunicationHookType.FP16)),
    Contender("Accelerate BF16", accelerate_hook(DDPCommunicationHookType.BF16)),
    Contender(
        "Accelerate POWER_SGD rank 4, one bucket",
        accelerate_hook(
            DDPCommunicationHookType.POWER_SGD,
            ONE_BUCKET_MB,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=STEPS_TO_START,
        ),
    ),
    Contender("Accelerate LocalSGD, 8 steps", accelerate_local_sgd, cycle=PERIOD),
    Contender("torch post_localSGD + averager, period 8", torch_local_sgd, cycle=PERIOD),
    Contender("torch ZeroRedundancyOptimizer", torch_zero),
    Contender("torch ZeRO hook's schedule", zero_hook_schedule),
    Contender("torch FSDP2", fsdp2),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.set_defaults(hooks=OURS, output="peers.json", batch=12)
    parsed = parser.parse_args()
    contenders = [*map(hook_contender, split_hooks(parsed.hooks)), *PEERS]
    device = open_ranks()
    bench = Bench.of(parsed, bench_models.load(parsed.model, parsed.params), contenders, device)
    result = bench.run()
    if dist.get_rank() == 0:
        print_table(result.to_dict())
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What agreement costs: ``python benchmarks/agreement.py`` on two ranks of this machine.

Prints the seconds that an attach takes and how many of them are the comparison of ranks, and what the running check adds to
a step of the 14M transformer: pairs of turns with the check in every step and without, so that a hundredth of the
difference is what the default, every 100 reductions, adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

from accel_commhooks import attach
from accel_commhooks.attachment import agreement
from accel_commhooks.bench.models import load


def measure(rank: int, world_size: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    workload = load(None, arguments.model)
    batch = workload.make_batch(1, arguments.tokens)
    compared: list[float] = []
    real = agreement.compare

    def timed(*args, **kwargs):
        started = time.perf_counter()
        result = real(*args, **kwargs)
        compared.append(time.perf_counter() - started)
        return result

    agreement.compare = timed
    attached, steps = [], {0: [], 1: []}
    for _ in range(arguments.rounds):
        for every in (0, 1):
            ddp = DistributedDataParallel(workload.make_model())
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            dist.barrier()
            started = time.perf_counter()
            handle = attach(ddp, "allreduce", optimizer=optimizer, check_every=every)
            attached.append(time.perf_counter() - started)
            for step in range(arguments.steps + 2):
                dist.barrier()
                started = time.perf_counter()
                ddp(**batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step > 1:
                    steps[every].append(time.perf_counter() - started)
            handle.detach()
    if rank == 0:
        plain = statistics.median(steps[0])
        pairs = [b - a for a, b in zip(steps[0], steps[1], strict=True)]
        each = statistics.median(pairs)
        figures = {
            "model": arguments.model,
            "attach_seconds": statistics.median(attached),
            "of_which_comparing_ranks": statistics.median(compared),
            "step_seconds": plain,
            "seconds_of_one_check": each,
            "percent_of_a_step_at_every_100": 100 * each / 100 / plain,
        }
        print(json.dumps(figures, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="14M")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (2, str(Path(folder)), arguments), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())

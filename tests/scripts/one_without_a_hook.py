"""Three ranks, of which the last runs plain DDP and has never heard of hooks."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
if rank != 2:
    import accel_commhooks

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
started = time.monotonic()
try:
    if rank != 2:
        accel_commhooks.attach(model, "powersgd")
    model(torch.ones(2, 4)).sum().backward()
except Exception:
    if rank == 0:
        print(f"seconds to the error: {time.monotonic() - started:.1f}", file=sys.stderr, flush=True)
    raise

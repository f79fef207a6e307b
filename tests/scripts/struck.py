"""Trains on four ranks; the last one is killed or stopped at its fifth step, and the others say how long it took to notice."""

import ast
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_commhooks import attach

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
# Like that of torchrun's agent, the store outlives the ranks.
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
timeout = timedelta(seconds=int(os.environ["TIMEOUT"]))
dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
options = ast.literal_eval(os.environ["OPTIONS"])
attach(model, options.pop("name"), optimizer=optimizer, **options)
struck = None
try:
    for step in range(20):
        if step == 5:
            struck = time.monotonic()
            if rank == 3:
                os.kill(os.getpid(), int(os.environ["FAULT"]))
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
finally:
    print(f"seconds: {time.monotonic() - (struck or 0):.1f}", flush=True)
    sys.stdout.flush()
    os._exit(0)

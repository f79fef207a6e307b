"""A script that builds DDP itself, and looks at how it was started."""

import json
import os
import sys
from pathlib import Path

import neighbour  # a file beside this one
import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    out = Path(sys.argv[2])
    rank = dist.get_rank()
    torch.save(model.module.state_dict(), out / f"final_{rank}.pt")
    seen = {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "main": getattr(sys.modules["__main__"], "main", None) is main,
        "neighbour": neighbour.VALUE,
        "path0": sys.path[0],
    }
    (out / f"seen_{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
    if "--fail" in sys.argv:
        raise RuntimeError("the script's own error")
    if "--exit" in sys.argv:
        os._exit(7)


if __name__ == "__main__":
    main()

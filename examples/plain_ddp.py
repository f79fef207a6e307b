"""A script that knows nothing of communication hooks: torch, DistributedDataParallel and a loop.

A hook gets in from outside, through the launcher::

    accelerate launch --config_file configs/accelerate/two_cpu_processes.yaml \\
        -m accel_commhooks configs/powersgd.yaml examples/plain_ddp.py

Without ``-m accel_commhooks configs/powersgd.yaml`` it trains with plain DDP. The task is to add two numbers given as digits,
which a small network learns by itself from examples.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIGITS = 3
BASE = 10


def sums(batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits of two numbers, and the digits of their sum."""
    powers = BASE ** torch.arange(DIGITS + 1)
    numbers = torch.randint(BASE**DIGITS, (batch_size, 2), generator=generator)
    digits = numbers[:, :, None] // powers[:DIGITS] % BASE
    return digits.flatten(1), numbers.sum(dim=1)[:, None] // powers % BASE


class Adder(nn.Module):
    def __init__(self, width: int = 512):
        super().__init__()
        self.embed = nn.Embedding(2 * DIGITS * BASE, 32)
        self.layers = nn.Sequential(
            nn.Linear(2 * DIGITS * 32, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, (DIGITS + 1) * BASE)
        self.register_buffer("offsets", torch.arange(2 * DIGITS) * BASE)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embed(digits + self.offsets).flatten(1))
        return self.head(hidden).view(-1, DIGITS + 1, BASE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=128, help="of each process")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    arguments = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Adder().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    generator = torch.Generator().manual_seed(1 + rank)  # every process makes examples of its own

    for step in range(1, arguments.steps + 1):
        digits, answers = (tensor.to(device) for tensor in sums(arguments.batch_size, generator))
        loss = nn.functional.cross_entropy(model(digits).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and (step % 100 == 0 or step == arguments.steps):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    digits, answers = (tensor.to(device) for tensor in sums(2000, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        accuracy = (model.module(digits).argmax(dim=2) == answers).float().mean()
    if rank == 0:
        print(f"digits right: {accuracy.item():.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Small models, data and training loops that the tests share."""

from __future__ import annotations

import os

import torch
from ranks import DEVICE_VARIABLE
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def device() -> torch.device:
    """Where this rank's models and data are: the CPU, or what ``pytest --device`` named."""
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))


def narrow_sum_error(dtype: torch.dtype, world_size: int) -> float:
    """The largest relative error of a mean over ranks that travels in a narrow type.

    Each rank's part is rounded once. NCCL also adds in that type, with a rounding for each of the W - 1 sums, where a sum in
    float32 has one in the end: half a unit in the last place each time.
    """
    roundings = 2 if device().type == "cpu" else world_size
    return roundings * torch.finfo(dtype).eps / 2


class Net(nn.Module):
    """Matrices of several shapes, biases, a norm, and a tied weight."""

    def __init__(self, width: int = 16, buffers: bool = False):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if buffers else nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(self.second(torch.tanh(self.first(hidden))))
        return self.head(hidden)


class PlantedFailure(Exception):
    """Of a test, to be caught by it."""


class FailingBackward(torch.autograd.Function):
    """Does nothing in forward; its backward raises a :class:`PlantedFailure`."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise PlantedFailure


def make_ddp(model: nn.Module | None = None, *, seed: int = 0, **ddp) -> DistributedDataParallel:
    torch.manual_seed(seed)
    ddp.setdefault("bucket_cap_mb", 0.004)
    return DistributedDataParallel((model if model is not None else Net()).to(device()), **ddp)


def batch(rank: int, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 20, (size,), generator=generator)
    tokens = tokens.to(device())
    return tokens, (tokens * 7 + 3) % 20


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens), labels)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies on the host."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.detach().cpu().clone() for name, value in module.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def two_groups(model: nn.Module) -> list[dict]:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def train(
    ddp: nn.Module,
    rank: int,
    steps: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
    accumulation: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    on_step=None,
) -> torch.optim.Optimizer:
    """A hand-written loop: accumulation under no_sync, clipping, a linear schedule."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(first, first + steps):
        if schedule:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / 100)
        for micro in range(accumulation):
            scale = 1 / accumulation
            if micro < accumulation - 1:
                with ddp.no_sync():
                    (loss_of(ddp, rank, step * accumulation + micro) * scale).backward()
            else:
                (loss_of(ddp, rank, step * accumulation + micro) * scale).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step)
    return optimizer

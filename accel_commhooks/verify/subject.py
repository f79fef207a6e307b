"""What the checks train: a small model with several buckets, with delays that differ from rank to rank.

AdamW's epsilon is 1, far above every gradient. So a step is nearly linear in the gradients: a mean that is wrong by a factor
shows in the weights (with a small epsilon AdamW divides the factor out), and rounding is amplified by no more than a known bound.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - verify builds models as a user does

from ..attachment.handle import Attachment, attach
from ..config.config import CommHookConfig
from ..upstream import seams

VOCABULARY, WIDTH = 192, 64
BUCKET_MB = 0.05
LEARNING_RATE, EPSILON = 0.5, 1.0
LONGEST_NAP = 0.004
"""Seconds; several times what a collective of this model takes on one machine."""
STREAM_CYCLES = 2_000_000
"""About a millisecond of a GPU's clock."""

Weights = dict[str, torch.Tensor]


class Delays:
    """Sleeps at random, differently on every rank; where there is a CUDA stream, that is kept busy as well."""

    def __init__(self, seed: int, device: torch.device, *, active: bool):
        self._random = random.Random(seed)
        self._device, self._active = device, active

    def __call__(self) -> None:
        if not self._active:
            return
        if self._random.random() < 0.3:
            time.sleep(self._random.random() * LONGEST_NAP)
        if self._device.type == "cuda" and self._random.random() < 0.3:
            seams.keep_stream_busy(self._random.randrange(STREAM_CYCLES))


class _DelayedBackward(torch.autograd.Function):
    """Does nothing in forward; its backward is late."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, delays: Delays) -> torch.Tensor:
        ctx.delays = delays
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.delays()
        return gradients[0], None


class SmallNet(nn.Module):
    """An embedding, matrices of several shapes, vectors, a norm."""

    def __init__(self, delays: Delays):
        super().__init__()
        self.delays = delays
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            hidden = hidden + _DelayedBackward.apply(down(torch.tanh(up(hidden))), self.delays)
        return _DelayedBackward.apply(self.head(self.norm(hidden)), self.delays)


@dataclass
class Subject:
    """A model in training, on this rank: under plain DDP where ``handle`` is None."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    rank: int
    device: torch.device
    delays: Delays
    handle: Attachment | None = None

    @classmethod
    def make(
        cls, config: CommHookConfig | None, rank: int, device: torch.device, *, delayed: bool = True, seed: int = 0
    ) -> Subject:
        delays = Delays(1000 * seed + rank, device, active=delayed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = SmallNet(delays).to(device)
        ddp = DistributedDataParallel(
            model, device_ids=None if device.type == "cpu" else [device], bucket_cap_mb=BUCKET_MB
        )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, eps=EPSILON)
        subject = cls(ddp, optimizer, rank, device, delays)
        if config is not None:
            subject.handle = attach(ddp, config, optimizer=optimizer)
        return subject

    @property
    def hook(self) -> Any:
        assert self.handle is not None
        return self.handle.hook

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100_003 * step + self.rank)
        tokens = torch.randint(0, VOCABULARY, (32,), generator=generator).to(self.device)
        return nn.functional.cross_entropy(self.ddp(tokens), (7 * tokens + 3) % VOCABULARY)

    def backward(self, step: int) -> None:
        loss = self.loss(step)
        self.delays()
        loss.backward()

    def finish(self) -> None:
        self.delays()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: range | int) -> None:
        for step in range(steps) if isinstance(steps, int) else steps:
            self.backward(step)
            self.finish()

    def scaled_step(self, step: int, scaler: torch.amp.GradScaler, factor: float = 1.0) -> None:
        """A step under a GradScaler, whose loss is multiplied by ``factor`` on this rank."""
        loss = self.loss(step) * factor
        self.delays()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        self.delays()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        if self.handle is not None:
            self.handle.synchronize()

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.ddp.module.named_parameters()}

    def close(self) -> None:
        if self.handle is not None:
            self.handle.detach()


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of any element; NaN where something is not finite."""
    return float(torch.stack([(one[name].double() - other[name].double()).abs().amax() for name in one]).amax())


def largest(tensors: Weights) -> float:
    """The largest absolute value of any element; NaN where there is one."""
    return float(torch.stack([tensor.detach().abs().amax().double() for tensor in tensors.values()]).amax())

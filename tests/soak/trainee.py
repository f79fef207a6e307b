"""A model in training on one rank, with one hook: one optimizer step of a script in which anything may happen."""

from __future__ import annotations

import contextlib
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Net, batch, two_groups, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_commhooks import attach
from accel_commhooks.attachment import checkpoint


class Heads(Net):
    """Two heads, of which a forward uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(16, 20) for _ in range(2))

    def forward(self, tokens: torch.Tensor, used: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        hidden = self.norm(self.second(torch.tanh(self.first(self.embed(tokens)))))
        return sum((self.more[head](hidden) for head in used), self.head(hidden))


@dataclass(frozen=True)
class Step:
    """What happens in a step; the same for all ranks, so that it can be repeated."""

    number: int
    seed: int
    accumulated: int
    discards: str | None
    """How gradients of one more backward are cleared, if there is one: 'dropped' or 'in place'."""
    overflow: int | None
    """The rank whose loss is infinite."""

    @classmethod
    def draw(cls, draw: random.Random, number: int, world_size: int) -> Step:
        return cls(
            number=number,
            seed=draw.getrandbits(32),
            accumulated=draw.choice((1, 1, 1, 2, 3)),
            discards=draw.choice(("dropped", "in place")) if draw.random() < 0.1 else None,
            overflow=draw.randrange(world_size) if draw.random() < 0.08 else None,
        )


class Trainee:
    def __init__(self, rank: int, hook: str, options: dict[str, Any], draw: random.Random):
        self.rank, self.hook, self.options = rank, hook, options
        self.naps = random.Random(rank)
        self.overflows = self.plain_steps = 0
        self.problems: list[str] = []
        torch.manual_seed(draw.getrandbits(32))
        self.model = Heads()
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10) if draw.random() < 0.5 else None
        )
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(two_groups(self.model), lr=2e-3)
            if draw.random() < 0.5
            else torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        )
        self.wrap(draw)
        self.attach()

    # The life of the hook.

    def wrap(self, draw: random.Random) -> None:
        """A new DDP wrapper around the model; some look for unused parameters, and then there are some."""
        self.leaves_out = draw.random() < 0.6
        self.ddp = DistributedDataParallel(
            self.model,
            bucket_cap_mb=0.004,
            find_unused_parameters=self.leaves_out,
            gradient_as_bucket_view=draw.random() < 0.5,
        )

    def attach(self) -> None:
        self.handle = attach(self.ddp, self.hook, optimizer=self.optimizer, **self.options)

    def wrap_anew(self, draw: random.Random) -> None:
        """The hook of the former wrapper retires by itself."""
        self.wrap(draw)
        self.attach()

    # One step.

    def backward(self, step: Step, item: int) -> None:
        if self.naps.random() < 0.03:
            time.sleep(self.naps.random() * 0.02)
        heads: tuple[int, ...] = (0, 1)
        if self.leaves_out:
            heads = random.Random(f"{step.seed}/{item}/{self.rank}").choice(((), (0,), (1,), (0, 1)))
        tokens, labels = batch(self.rank, (step.seed + item) % 2**40)
        loss = nn.functional.cross_entropy(self.ddp(tokens, heads), labels)
        if not math.isfinite(loss.item()):
            self.problems.append(f"step {step.number}: the loss is {loss.item()}")
        if step.overflow == self.rank and item == 0:
            loss = loss * torch.inf
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def step(self, step: Step) -> None:
        if step.discards is not None:
            self.backward(step, 50)
            self.optimizer.zero_grad(set_to_none=step.discards == "dropped")
        for item in range(step.accumulated):
            last = item == step.accumulated - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                self.backward(step, item)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.overflows += step.overflow is not None
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self._finite_everywhere(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _finite_everywhere(self, norm: torch.Tensor) -> bool:
        """Without a scaler the script itself leaves a step out, on all ranks."""
        bad = (~torch.isfinite(norm)).float().reshape(1)
        dist.all_reduce(bad)
        return not bad.any()

    def evaluate(self) -> None:
        """The consensus, by ranks that run different numbers of forwards."""
        with self.handle.consensus():
            self.ddp.eval()
            with torch.no_grad():
                for item in range(1 + self.rank):
                    loss = nn.functional.cross_entropy(self.model(batch(self.rank, item)[0]), batch(self.rank, item)[1])
            self.ddp.train()
            if not math.isfinite(loss.item()):
                self.problems.append(f"the evaluation's loss is {loss.item()}")

    # Checkpoints: as of a script that writes the model and the optimizer once, and the scaler on every rank.

    def save(self, folder: Path) -> None:
        self.handle.open_consensus()
        self.handle.prepare_save()
        checkpoint.save(self.handle, folder)
        if self.rank == 0:
            torch.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "script.pt"
            )
        if self.scaler is not None:
            torch.save(self.scaler.state_dict(), folder / f"scaler_{self.rank}.pt")
        dist.barrier()

    def load(self, folder: Path, draw: random.Random) -> None:
        """In any order."""
        saved = torch.load(folder / "script.pt", weights_only=True)
        parts = [self._load_hook, self._load_model, self._load_optimizer]
        for part in draw.sample(parts, len(parts)):
            part(folder, saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(torch.load(folder / f"scaler_{self.rank}.pt", weights_only=True))

    def _load_hook(self, folder: Path, saved: dict[str, Any]) -> None:
        if not checkpoint.load(self.handle, folder):
            self.problems.append("the hook's state could not be loaded")

    def _load_model(self, folder: Path, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])

    def _load_optimizer(self, folder: Path, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved["optimizer"])

    # What is compared.

    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model)

    def left_behind(self) -> list[torch.Tensor]:
        """What plain DDP goes on with after detach(): weights, the optimizer's state, the loss scale."""
        parts = list(self.weights().values())
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            parts += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
        return parts + ([torch.tensor(self.scaler.get_scale())] if self.scaler is not None else [])

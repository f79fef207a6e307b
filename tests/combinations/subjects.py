"""The models of the cases: small, of several shapes, each with one trait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from models import Net
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 10


class Checkpointed(Net):
    def forward(self, tokens):
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), self.embed(tokens), use_reentrant=False)
        return self.head(self.norm(checkpoint(self.second, hidden, use_reentrant=False)))


class Adapters(nn.Module):
    """All trainable weights are inside reentrant checkpoints."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(20, width).requires_grad_(False)
        self.base = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(width, 3, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(3, width) for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens).requires_grad_()
        for block in zip(self.base, self.down, self.up, strict=True):
            hidden = checkpoint(self._block, hidden, *block, use_reentrant=True)
        return hidden @ self.embed.weight.t()

    @staticmethod
    def _block(hidden, base, down, up):
        return hidden + torch.tanh(base(hidden) + up(down(hidden)))


class Branching(Net):
    """Ranks use different heads, and neither of them now and then."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 20), nn.Linear(16, 20)
        self.branch = 0

    def forward(self, tokens):
        hidden = self.norm(self.second(torch.tanh(self.first(self.embed(tokens)))))
        logits = self.head(hidden)
        if self.branch < 2:
            logits = logits + (self.left, self.right)[self.branch](hidden)
        return logits


class Scaled(Net):
    """As CLIP: a parameter without dimensions; and one of three."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.mix = nn.Parameter(torch.randn(2, 5, 16) * 0.1)

    def forward(self, tokens):
        return super().forward(tokens) * self.logit_scale.exp() + self.mix.sum((0, 1)) @ self.embed.weight.t()


@dataclass
class Output:
    logits: torch.Tensor
    more: dict


class Packed(Net):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return Output(logits=logits, more={"doubled": (2 * logits, None)})


class Box:
    """Something that nobody looks into."""

    def __init__(self, logits):
        self.logits, self.more = logits, {"doubled": (2 * logits, None)}


class Boxed(Net):
    def forward(self, tokens):
        return Box(super().forward(tokens))


def build(trait: str) -> nn.Module:
    torch.manual_seed(0)
    if trait == "adapters, reentrant checkpoints":
        return Adapters()
    if trait == "compiled":
        return torch.compile(Net(), backend="eager")
    classes = {
        "checkpoints": Checkpointed,
        "branching": Branching,
        "scalar parameter": Scaled,
        "dataclass output": Packed,
        "opaque output": Boxed,
    }
    if trait in classes:
        return classes[trait]()
    model = Net(buffers=trait == "batchnorm")
    if trait == "part frozen":
        model.first.requires_grad_(False)
    return model


def at_step(trait: str, model: nn.Module, rank: int, step: int) -> None:
    """What changes in the model from step to step."""
    if trait == "frozen and thawed":
        model.first.requires_grad_(not 3 <= step < 6)
    elif trait == "branching":
        model.branch = (rank + step) % 3 if step % 4 else 2


def logits_of(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else 0.5 * output.logits + 0.25 * output.more["doubled"][0]

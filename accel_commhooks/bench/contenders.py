"""What is measured: hooks by name, plain DDP, or anything else that trains a model step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - bench builds models as a user does

from ..attachment.handle import Attachment, attach
from ..config.config import CommHookConfig, looks_like_path
from ..config.errors import ConfigError, shown
from ..config.registry import available_hooks, get_hook
from ..config.strict_yaml import read_yaml
from .models import Batch
from .report import BASELINE

PLAIN = "ddp"
"""The contender that is DDP without any hook."""


@dataclass
class Trial:
    """A contender at work: a model, its optimizer, and the hook attached to it, if any."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    handle: Attachment | None = None
    on_step: Callable[[], None] | None = None
    """Called after the optimizer's step, for averagers and the like."""

    def step(self, batch: Batch) -> torch.Tensor:
        output = self.model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        self.optimizer.step()
        if self.on_step is not None:
            self.on_step()
        self.optimizer.zero_grad()
        return loss.detach()

    def drain(self) -> None:
        if self.handle is not None:
            self.handle.synchronize()

    def close(self) -> None:
        """Every rank calls it; what is left is for the garbage collector."""
        if self.handle is not None:
            self.handle.detach()


@dataclass(frozen=True)
class Contender:
    """Something to measure. ``build`` prepares it on every rank; an exception is reported as the reason it cannot run."""

    label: str
    build: Callable[[torch.nn.Module], Trial]
    cycle: int = 1
    """Optimizer steps in one full cycle of the hook."""
    lead: int = 1
    """Untimed steps at the start of a turn, so that overlapped work is already under way at the first timed step."""
    config: CommHookConfig | None = None
    """For a prediction of its cost."""


def make_ddp(model: torch.nn.Module, **arguments: Any) -> DistributedDataParallel:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device], **arguments)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def hook_contender(source: CommHookConfig | str) -> Contender:
    """A contender from a hook's name, a path, ``name{option: value}``, a config, or ``ddp``."""
    if source == PLAIN:

        def build_plain(model: torch.nn.Module) -> Trial:
            ddp = make_ddp(model)
            return Trial(ddp, make_optimizer(ddp))

        return Contender(PLAIN, build_plain, config=CommHookConfig(BASELINE))
    config = start_at_once(source if isinstance(source, CommHookConfig) else parse_hook(source))

    def build(model: torch.nn.Module) -> Trial:
        ddp = make_ddp(model)
        optimizer = make_optimizer(ddp)
        return Trial(ddp, optimizer, attach(ddp, config, optimizer=optimizer))

    options = config.build_options()
    return Contender(_label(source), build, options.cycle(), options.lead(), config)


def parse_hook(text: str) -> CommHookConfig:
    """A name, a path, or ``name{option: value, ...}``, which is YAML between the braces."""
    name, brace, rest = text.partition("{")
    if not brace:
        return (
            CommHookConfig.load(text) if looks_like_path(text) else CommHookConfig(text, get_hook(text).bench_options)
        )
    options = read_yaml(brace + rest, f"options of a hook are written name{{option: value, ...}}, but {shown(text)}")
    return CommHookConfig(name.strip(), {**get_hook(name.strip()).bench_options, **options})


def _label(source: CommHookConfig | str) -> str:
    if isinstance(source, CommHookConfig):
        return source.name
    return Path(source).stem if Path(source).suffix in (".yaml", ".yml", ".json") else source


def split_hooks(text: str) -> list[str]:
    """Split at commas that are not inside braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def parse_hooks(text: str | None) -> list[Contender]:
    """The contenders of ``--hooks``; all hooks there are when it is left out."""
    sources = split_hooks(text) if text else [PLAIN, *available_hooks()]
    contenders = [hook_contender(source) for source in sources]
    labels = [contender.label for contender in contenders]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError(f"every contender needs a name of its own, but got {', '.join(twice)} twice")
    return contenders


STEPS_TO_START = 2
"""Steps before a hook acts in a measurement: DDP rebuilds its buckets after the first."""


def start_at_once(config: CommHookConfig) -> CommHookConfig:
    """The same hook, acting from the third step on.

    Hooks let a run settle first (``start_powerSGD_iter``, ``start_localSGD_iter``, ``warmup_steps``: a thousand steps by
    torch's default). What they do then is what is measured, so those options are lowered, and only lowered.
    """
    return CommHookConfig(config.name, {**config.options, **config.build_options().starting_by(STEPS_TO_START)})

"""Who takes part in a measurement: hooks by name, plain DDP, or anything that trains a model step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from ..attachment.handle import Attachment, attach
from ..config.config import CommHookConfig
from ..config.errors import ConfigError
from ..config.options import HookOptions
from ..config.registry import available_hooks
from .models import Batch
from .report import LIMIT

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


@dataclass(frozen=True)
class Contender:
    """Something to measure. ``build`` makes it ready on every rank; what it raises is shown as the reason."""

    label: str
    build: Callable[[torch.nn.Module], Trial]
    cycle: int = 1
    """Steps after which it has done everything it does."""
    lead: int = 1
    """Untimed steps at the start of a turn: what they leave under way is under way at the first timed step."""
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

        return Contender(PLAIN, build_plain, config=CommHookConfig("allreduce"))
    config = start_at_once(source if isinstance(source, CommHookConfig) else parse_hook(source))

    def build(model: torch.nn.Module) -> Trial:
        ddp = make_ddp(model)
        optimizer = make_optimizer(ddp)
        return Trial(ddp, optimizer, attach(ddp, config, optimizer=optimizer))

    options = config.build_options()
    return Contender(_label(source), build, cycle(options), lead(options), config)


def parse_hook(text: str) -> CommHookConfig:
    """A name, a path, or ``name{option: value, ...}``, which is YAML between the braces."""
    name, brace, rest = text.partition("{")
    if not brace:
        return CommHookConfig.load(text, **_consent(text))
    try:
        options = yaml.safe_load(brace + rest)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"options of a hook are written name{{option: value, ...}}, but got {text!r}: {' '.join(str(error).split())}"
        ) from None
    return CommHookConfig(name.strip(), {**_consent(name.strip()), **options})


def _consent(name: str) -> dict[str, bool]:
    """The speed limit is asked for on purpose here, so nobody needs to be warned that its replicas diverge."""
    return {"i_know_that_replicas_diverge": True} if name == LIMIT else {}


def _label(source: CommHookConfig | str) -> str:
    if isinstance(source, CommHookConfig):
        return source.name
    return Path(source).stem if Path(source).suffix in (".yaml", ".yml", ".json") else source


def split_hooks(text: str) -> list[str]:
    """At commas that are not inside braces."""
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


# When a hook acts, read from how its options are called.

STEPS_TO_START = 2
"""Steps before a hook acts in a measurement: DDP rebuilds its buckets after the first."""


def start_at_once(config: CommHookConfig) -> CommHookConfig:
    """The same hook, acting from the third step on.

    Hooks let a run settle first (``start_powerSGD_iter``, ``start_localSGD_iter``, ``warmup_steps``: a thousand steps by
    torch's default). What they do then is what is measured, so those options are lowered, and only lowered.
    """
    present = {f.name: getattr(config.build_options(), f.name) for f in fields(config.build_options())}
    return CommHookConfig(config.name, {**config.options, **_lowered(present)})


def _lowered(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            continue
        if isinstance(value, dict):
            inner = _lowered(value)
            if inner:
                found[name] = {**value, **inner}
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and _says_when_to_start(name)
            and value > STEPS_TO_START
        ):
            found[name] = STEPS_TO_START
    return found


def _says_when_to_start(name: str) -> bool:
    return name.startswith("start_") or name == "warmup_steps"


def cycle(options: HookOptions) -> int:
    """Steps after which a hook has done everything it does: a timed window holds whole cycles.

    ``period`` and ``period_group_size`` say so themselves; ``alternate`` takes turns between two steps.
    """
    levels = getattr(options, "period_group_size", None) or {getattr(options, "period", 1): None}
    return math.lcm(*levels, 2 if getattr(options, "alternate", False) else 1)


def lead(options: HookOptions) -> int:
    """What runs on over several steps (``overlap_steps``) is under way for certain after a whole cycle, the rest after one."""
    return cycle(options) if getattr(options, "overlap_steps", 0) else 1

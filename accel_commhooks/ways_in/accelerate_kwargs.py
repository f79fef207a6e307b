"""CommHookKwargs: a hook for ``Accelerator(kwargs_handlers=[...])``, with all of Accelerate's DDP keywords."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from ..attachment import compatibility
from ..attachment.handle import Attachment, attach
from ..attachment.optimizers import before_every_step
from ..config.config import CommHookConfig
from ..config.errors import CompatibilityError
from . import accelerate_state

_DDP_KEYWORDS = {f.name for f in dataclasses.fields(DistributedDataParallelKwargs) if not f.name.startswith("comm_")}


@dataclass
class CommHookKwargs(DistributedDataParallelKwargs):
    """``CommHookKwargs(hook="powersgd", options={...}, bucket_cap_mb=25)``.

    ``hook`` may also be a path or a mapping; None reads the environment. The hook is attached when Accelerate builds the
    DDP model, and its state is saved and restored with ``accelerator.save_state`` and ``load_state``. From then on
    ``handle`` is the attachment.
    """

    hook: str | dict | CommHookConfig | None = None
    options: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("comm_hook", "comm_wrapper"):
            value = getattr(self, name)
            if value != DDPCommunicationHookType.NO:
                raise CompatibilityError(
                    f"CommHookKwargs takes the hook as hook= and its options as options=, but Accelerate's own "
                    f"{name}={value!s} was set as well; keep hook= and options= only"
                )
        self._config = CommHookConfig.with_options(self.hook, self.options)
        self.handle: Attachment | None = None
        compatibility.refuse_other_strategies(self._config.name)
        self._first_step = before_every_step(self._before_first_step)

    # Accelerate looks handlers up by their exact class, so a subclass answers with its parent's.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return DistributedDataParallelKwargs

    def to_dict(self) -> dict[str, Any]:
        """DDP's keywords alone: Accelerate hands them to DistributedDataParallel."""
        return {name: getattr(self, name) for name in _DDP_KEYWORDS}

    def to_kwargs(self) -> dict[str, Any]:
        """Those that differ from Accelerate's defaults."""
        defaults = DistributedDataParallelKwargs()
        return {name: value for name, value in self.to_dict().items() if value != getattr(defaults, name)}

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Called by Accelerate right after it built the DDP model."""
        self._first_step.remove()
        self.handle = attach(model, self._config)
        accelerate_state.link_live()

    def _before_first_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Only reached while no DDP model was built: the hook could never act."""
        compatibility.no_ddp_at_step(
            self._config.name, [p for group in optimizer.param_groups for p in group["params"]]
        )

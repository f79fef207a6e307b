"""install(): a hook on every DDP model that this process builds later, without a change in the script.

The hook is attached at a model's first forward, or when a checkpoint is loaded before that. If an optimizer steps although no
DDP model with its parameters was built, that is logged: nothing is skipped silently.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..attachment import compatibility
from ..attachment.discovery import DDPWatch, before_first_forward
from ..attachment.handle import Attachment, attach
from ..attachment.optimizers import after_closure, before_every_step
from ..attachment.slot import attachment_of
from ..config.config import CommHookConfig
from . import accelerate_state


class Installation(DDPWatch):
    """What :func:`install` returns; ``uninstall()`` stops watching and detaches."""

    def __init__(self, config: CommHookConfig):
        super().__init__()
        self.config = config
        self._first_step = before_every_step(self._before_step)
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def found(self, ddp: torch.nn.Module, module: torch.nn.Module) -> None:
        before_first_forward(ddp, self._first_forward)
        accelerate_state.link_live(self.attachment)

    def _first_forward(self, ddp: torch.nn.Module, args: Any) -> None:
        if attachment_of(ddp) is None:
            # torch has listed the hooks of this forward already: ours is called by hand this once.
            attach(ddp, self.config).clock.before_forward(ddp, args)

    def attachment(self, model: torch.nn.Module) -> Attachment | None:
        """The attachment of a model that this installation saw being built, made now if need be."""
        ddp = self.wrapper_around_or_inside(model)
        if ddp is None:
            return None
        return attachment_of(ddp) or attach(ddp, self.config)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._check(optimizer)
        waiting = [ddp for ddp in self if attachment_of(ddp) is None]
        if not waiting:
            return None

        def attached_meanwhile() -> None:
            """The closure ran the first forward: tell the attachment what it has missed."""
            for ddp in waiting:
                attached = attachment_of(ddp)
                if attached is not None:
                    attached.clock.before_step(optimizer, (), {})

        return after_closure(args, kwargs, attached_meanwhile)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        ours = {id(p) for ddp in self for p in ddp.module.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in ours for p in parameters):
            compatibility.no_ddp_at_step(self.config.name, parameters)

    def uninstall(self) -> None:
        self.stop()
        self._first_step.remove()
        for ddp in self:
            attached = attachment_of(ddp)
            if attached is not None:
                attached.detach()


def install(hook: CommHookConfig | dict | str | None = None, **options: Any) -> Installation:
    """Attach a hook to every DDP model built later in this process."""
    config = CommHookConfig.load(hook, **options)
    compatibility.refuse_other_strategies(config.name)
    return Installation(config)

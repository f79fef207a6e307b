"""install(): a hook on every DDP model that this process builds later, without a change in the script.

torch tells when a module is given a child; a DDP wrapper is given its ``module`` while it is built, and the hook is
attached at its first forward, or when a checkpoint is loaded before that. An optimizer that steps although no DDP model
with its parameters was ever built is an error: nothing is skipped silently.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..attachment import compatibility
from ..attachment.handle import Attachment, attach, attachment_of
from ..config.config import CommHookConfig
from . import accelerate_state


class DDPWatch:
    """Remembers the DDP wrappers built since it was started."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._handle = register_module_module_registration_hook(self._registered)

    def _registered(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel) and name == "module":
            self._seen.add(parent)
            self.found(parent)

    def found(self, ddp: DistributedDataParallel) -> None:
        """A wrapper is being built; it is not finished yet."""

    def wrapper_of(self, model: torch.nn.Module) -> DistributedDataParallel | None:
        """The wrapper around a model, the newest if there are several."""
        return next((ddp for ddp in self._seen if ddp.module is model or _unwrapped(ddp.module) is model), None)

    def stop(self) -> None:
        self._handle.remove()


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return getattr(module, "_orig_mod", module)


class Installation(DDPWatch):
    """What :func:`install` returns; ``uninstall()`` stops watching and detaches."""

    def __init__(self, config: CommHookConfig):
        super().__init__()
        self.config = config
        self._first_step = register_optimizer_step_pre_hook(self._before_step)
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def found(self, ddp: DistributedDataParallel) -> None:
        def first_forward(module: torch.nn.Module, args: Any) -> None:
            handle.remove()
            if attachment_of(ddp) is None:
                # torch has listed the hooks of this forward already: ours is called by hand this once.
                attach(ddp, self.config).before_forward(ddp, args)

        handle = ddp.register_forward_pre_hook(first_forward, prepend=True)
        accelerate_state.link_live(self.attachment)

    def attachment(self, model: torch.nn.Module) -> Attachment | None:
        """The attachment of a model that this installation saw being built, made now if need be."""
        ddp = next((ddp for ddp in self._seen if ddp in model.modules() or ddp.module is model), None)
        if ddp is None:
            return None
        return attachment_of(ddp) or attach(ddp, self.config)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        ours = {id(p) for ddp in self._seen for p in ddp.module.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in ours for p in parameters) and not any(map(attachment_of, self._seen)):
            compatibility.no_ddp_at_first_step(self.config.name, parameters)

    def uninstall(self) -> None:
        self.stop()
        self._first_step.remove()
        for ddp in self._seen:
            attached = attachment_of(ddp)
            if attached is not None:
                attached.detach()


def install(hook: CommHookConfig | dict | str | None = None, **options: Any) -> Installation:
    """Attach a hook to every DDP model built later in this process."""
    config = CommHookConfig.load(hook, **options)
    compatibility.refuse_other_strategies(config.name)
    return Installation(config)

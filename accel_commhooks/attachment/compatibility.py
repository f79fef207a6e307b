"""What cannot work, and what to do instead. All of these rules are checked before the first step."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.process_group import world_size
from ..config.errors import CompatibilityError, warn_once
from ..upstream import seams


def require_ddp(model: Any, hook: str) -> DistributedDataParallel:
    """Return the model if a hook can be attached to it; otherwise raise the reason and the remedy."""
    if isinstance(model, DistributedDataParallel):
        return model
    kind = f"{type(model).__module__}.{type(model).__name__}"
    if is_sharded(model):
        raise CompatibilityError(
            f"hook '{hook}' needs DistributedDataParallel, but the model is sharded by FSDP ({kind}), which reduces "
            "gradients itself; turn FSDP off to use the hook, or leave the hook out"
        )
    if "deepspeed" in kind.lower():
        raise CompatibilityError(
            f"hook '{hook}' needs DistributedDataParallel, but the model is a DeepSpeed engine ({kind}), which reduces "
            "gradients itself; turn DeepSpeed off to use the hook, or leave the hook out"
        )
    raise CompatibilityError(
        f"hook '{hook}' needs a DistributedDataParallel model, but got {kind}; wrap it in DistributedDataParallel, or "
        "let accelerator.prepare(model) do so under `accelerate launch` with more than one process"
    )


def is_sharded(model: Any) -> bool:
    """Whether this model's parameters are sharded by FSDP, version 1 or 2."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(
        type(m).__name__ in ("FullyShardedDataParallel", "FSDPModule") or type(m).__name__.startswith("FSDP")
        for m in model.modules()
    ) or any(map(seams.is_dtensor, model.parameters()))


def refuse_other_strategies(hook: str) -> None:
    """Fail early when the launcher has chosen FSDP or DeepSpeed for this process."""
    for variable, strategy in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise CompatibilityError(
                f"hook '{hook}' needs DistributedDataParallel, but the launcher chose {strategy} ({variable}="
                f"{os.environ[variable]}), which reduces gradients itself; use distributed_type: MULTI_GPU, or leave "
                "the hook out"
            )


def no_ddp_at_first_step(hook: str, parameters: list[torch.Tensor]) -> None:
    """An optimizer is about to step, and no DDP model with its parameters was ever built."""
    if any(map(seams.is_dtensor, parameters)):
        raise CompatibilityError(
            f"hook '{hook}' needs DistributedDataParallel, but the optimizer holds parameters sharded by FSDP; turn FSDP "
            "off to use the hook, or leave the hook out"
        )
    if world_size() > 1:
        raise CompatibilityError(
            f"hook '{hook}' was asked for, but the model that is about to be trained on {world_size()} "
            "processes is not in DistributedDataParallel, so the hook could never act; wrap it, or let "
            "accelerator.prepare(model) do so"
        )
    single_process(hook)


def single_process(hook: str) -> None:
    """A single process has nothing to communicate: warn once, and run."""
    warn_once(f"hook '{hook}' does nothing in a single process; training runs without it")


def second_hook(hook: str, reason: str) -> CompatibilityError:
    """DDP has a communication hook already, and can have only one."""
    return CompatibilityError(
        f"hook '{hook}' cannot be registered: this DDP model has a communication hook already, and can have only one "
        f"({reason}); name the hook in one place: not on DistributedDataParallelKwargs(comm_hook=...) or "
        "register_comm_hook as well as here"
    )


def ambiguous_scaler(count: int) -> CompatibilityError:
    return CompatibilityError(
        f"residuals are kept in unscaled units, but {count} GradScalers are alive and it is not known which one scales "
        "this model's loss; pass attach(..., grad_scaler=scaler), or delete the ones no longer used"
    )

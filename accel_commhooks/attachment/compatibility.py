"""What cannot work, and what to do instead. All of these rules are checked before the first step."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.process_group import world_size
from ..config.errors import CompatibilityError, warn_once
from ..hooks.base import CommHook
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


def no_ddp_at_step(hook: str, parameters: list[torch.Tensor]) -> None:
    """An optimizer is about to step, and no DDP model with its parameters was built so far.

    It may be a baseline before the real training, or a calibration after it, so this is a warning.
    """
    if any(map(seams.is_dtensor, parameters)):
        raise CompatibilityError(
            f"hook '{hook}' needs DistributedDataParallel, but the optimizer holds parameters sharded by FSDP; turn FSDP "
            "off to use the hook, or leave the hook out"
        )
    if world_size() > 1:
        warn_once(
            f"hook '{hook}' does nothing for a model that is being trained on {world_size()} processes but is not in "
            "DistributedDataParallel; if this is the model to train, wrap it, or let accelerator.prepare(model) do so"
        )
    else:
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


def refuse_model(module: torch.nn.Module, hook: type[CommHook]) -> None:
    """What a model may have that a hook cannot average."""
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise CompatibilityError(
            f"hook '{hook.name}' needs all parameters on one device, but this model has some on "
            f"{', '.join(sorted(map(str, devices)))}; put the model on one device, or leave the hook out"
        )
    if not hook.plain_tensors_only:
        return
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise CompatibilityError(
                f"hook '{hook.name}' needs real parameters, but '{name}' is {parameter.dtype}; keep it as two real "
                "parameters (torch.view_as_real), or use name: allreduce"
            )
    for name, part in module.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise CompatibilityError(
                f"hook '{hook.name}' needs dense gradients, but '{name}' has sparse ones; build it with sparse=False, or "
                "use name: allreduce"
            )


def refuse_graph_capture(hook: str) -> None:
    """A CUDA graph would replay the collectives of one step for ever."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CompatibilityError(
            f"hook '{hook}' does something else from step to step, but a CUDA graph is being captured, which repeats one "
            "step; capture no backward of this model, or detach the hook"
        )


def joining(hook: str) -> CompatibilityError:
    """``with ddp.join():`` lets ranks leave early, which the collectives of a hook do not allow for."""
    return CompatibilityError(
        f"hook '{hook}' needs every rank in every step, but the model is inside `with ddp.join():`, which lets ranks stop "
        "early; give all ranks the same number of batches (drop_last, or a sampler that pads), or detach the hook"
    )


def refuse_repeated_closures(hook: CommHook, optimizer: torch.optim.Optimizer) -> None:
    """LBFGS runs any number of backwards within one step."""
    if isinstance(optimizer, torch.optim.LBFGS) and not hook.allows_repeated_closures:
        raise CompatibilityError(
            f"hook '{hook.name}' expects one backward for each step, but LBFGS calls its closure many times, and not "
            "equally often on every rank; use another optimizer, or name: allreduce"
        )

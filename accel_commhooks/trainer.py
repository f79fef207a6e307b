"""Callbacks for ``transformers.Trainer``.

``CommHookCallback`` attaches a hook to the DDP model that Trainer builds, logs its figures beside the loss, and keeps its
state in Trainer's checkpoints. It only calls what custom loops can call too: see attachment.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import checkpoint, doctor, seams
from .attachment import Attachment, attach, attachment_of
from .config import CommHookConfig
from .errors import CompatibilityError
from .install import DDPWatch

TRAINER_STATE = "trainer_state.json"


class CommHookCallback(TrainerCallback):
    """``Trainer(..., callbacks=[CommHookCallback("powersgd", matrix_approximation_rank=4)])``.

    The hook is a name, a path to a YAML file or a mapping; nothing reads ``ACCELERATE_COMM_HOOK``.
    """

    def __init__(self, hook: CommHookConfig | dict | str | os.PathLike | None = None, **options: Any):
        self.config = CommHookConfig.load(hook, **options)
        self.handle: Attachment | None = None
        self._watch = DDPWatch()
        self._attached_here = False
        self._figures = _Figures(self)

    # Events, in Trainer's order.

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for strategy in ("fsdp", "deepspeed"):
            if getattr(args, strategy):
                raise CompatibilityError(
                    f"hook '{self.config.name}' needs DistributedDataParallel, but TrainingArguments has {strategy}="
                    f"{getattr(args, strategy)!r}, which reduces gradients itself; leave {strategy} out to use the hook"
                )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        seams.order_callbacks(first=self._figures, last=self)
        if args.world_size == 1:
            doctor.single_process(self.config.name)
            return
        ddp = self._find_ddp(kwargs["model"])
        existing = attachment_of(ddp)
        self._attached_here = existing is None
        self.handle = existing or attach(ddp, self.config, optimizer=kwargs.get("optimizer"))
        if state.global_step > 0:
            self._resume(args, state)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.handle is not None:
            self.handle.step_attempted()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show_consensus(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show_consensus(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.handle is not None:
            checkpoint.save(self.handle, Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.handle is not None:
            self.handle.synchronize()
            if self._attached_here:
                self.handle.detach()

    # Parts.

    def _find_ddp(self, model: torch.nn.Module) -> DistributedDataParallel:
        return self._watch.wrapper_of(model) or doctor.require_ddp(model, self.config.name)

    def _show_consensus(self, control: TrainerControl) -> None:
        """Trainer evaluates and saves right after this event: let it see the consensus."""
        if self.handle is None:
            return
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.handle.open_consensus()
        if control.should_save:
            self.handle.hook.prepare_save()

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Load the hook from the checkpoint that Trainer has just resumed from, and check that it is that one."""
        assert self.handle is not None
        folder = _resumed_checkpoint(args, state)
        if folder is None:
            doctor.warn_once(
                f"hook '{self.config.name}' starts anew at step {state.global_step}: the checkpoint that Trainer resumed "
                f"from is neither args.resume_from_checkpoint nor below {args.output_dir}; set "
                "TrainingArguments(resume_from_checkpoint=...) to the folder for the hook to resume as well"
            )
            return
        checkpoint.load(self.handle, folder)


class _Figures(TrainerCallback):
    """Adds the hook's figures to the training logs, ahead of the callbacks that report them."""

    def __init__(self, owner: CommHookCallback):
        self._owner = owner

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._owner.handle is not None and logs is not None and "loss" in logs:
            figures = self._owner.handle.metrics()
            logs.update(figures)
            state.log_history[-1].update(figures)


def _resumed_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Callbacks are not told which checkpoint was resumed; candidates are compared with the state it left behind."""
    candidates = [Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"]
    if isinstance(args.resume_from_checkpoint, str):
        candidates.insert(0, Path(args.resume_from_checkpoint))
    for folder in candidates:
        file = folder / TRAINER_STATE
        if file.is_file() and TrainerState.load_from_json(str(file)).log_history == state.log_history:
            return folder
    return None

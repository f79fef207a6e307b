"""Callbacks for ``transformers.Trainer``.

``CommHookCallback`` attaches a hook to the DDP model that Trainer builds, logs its figures beside the loss, and keeps its
state in Trainer's checkpoints. It only calls what custom loops can call too: see attachment/handle.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..attachment import agreement, checkpoint, compatibility, fingerprint
from ..attachment.discovery import DDPWatch
from ..attachment.handle import Attachment, attach
from ..attachment.metrics import PREFIX
from ..attachment.optimizers import innermost_optimizer
from ..attachment.slot import attachment_of
from ..comm.collectives import Communicator
from ..comm.process_group import everyone
from ..config.config import CommHookConfig
from ..config.errors import CompatibilityError, warn_once
from ..hooks.local_sgd.options import AveragingOptions
from ..hooks.local_sgd.replicas import Replicas
from ..upstream import seams

TRAINER_STATE = "trainer_state.json"


class CommHookCallback(TrainerCallback):
    """``Trainer(..., callbacks=[CommHookCallback("powersgd", matrix_approximation_rank=4)])``.

    The hook is a name, a path to a YAML file or a mapping; without one, ``ACCELERATE_COMM_HOOK`` is read.
    """

    def __init__(self, hook: CommHookConfig | dict | str | os.PathLike | None = None, **options: Any):
        self.config = CommHookConfig.load(hook, **options)
        self.handle: Attachment | None = None
        self._watch = DDPWatch()
        self._attached_here = False
        self._figures = _Figures(lambda: self.handle.metrics() if self.handle is not None else {})

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
            compatibility.single_process(self.config.name)
            return
        ddp = self._find_ddp(kwargs["model"])
        existing = attachment_of(ddp)
        self._attached_here = existing is None
        self.handle = existing or attach(ddp, self.config, optimizer=kwargs.get("optimizer"))
        if self.handle.hook.steps_in_backward and args.max_grad_norm:
            raise CompatibilityError(
                f"hook '{self.config.name}' steps inside backward as configured, before Trainer can clip with "
                f"max_grad_norm={args.max_grad_norm}; set step: optimizer, or TrainingArguments(max_grad_norm=0)"
            )
        if state.global_step > 0:
            self._resume(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show_consensus(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show_consensus(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.handle is not None:
            checkpoint.save(self.handle, _checkpoint_folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.handle is not None:
            self.handle.synchronize()
            if self._attached_here:
                self.handle.detach()

    # Parts.

    def _find_ddp(self, model: torch.nn.Module) -> torch.nn.Module:
        return self._watch.wrapper_of(model) or compatibility.require_ddp(model, self.config.name)

    def _show_consensus(self, control: TrainerControl) -> None:
        """Trainer evaluates and saves right after this event, and must see the consensus."""
        if self.handle is None:
            return
        if _evaluates_or_saves(control):
            self.handle.open_consensus()
        if control.should_save:
            self.handle.prepare_save()

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Load the hook from the checkpoint that Trainer has just resumed from, and check that it is that one."""
        assert self.handle is not None
        folder = _resumed_checkpoint(args, state)
        if folder is None:
            warn_once(_not_found(f"hook '{self.config.name}'", args, state))
            return
        checkpoint.load(self.handle, folder)


class ModelAveragingCallback(TrainerCallback):
    """Averages the ranks' models after optimizer steps: ``callbacks=[ModelAveragingCallback(period=8, warmup_steps=100)]``.

    Averaging alone, on top of plain DDP or of any communication hook. The options are those of post_localsgd that concern
    averaging; ``averager=`` takes a torch ``PeriodicModelAverager``, ``HierarchicalModelAverager`` or one of your own.
    """

    _FOLDER = "model_averaging"
    _made = 0
    """How many have begun in this process; the same on every rank."""

    def __init__(self, **options: Any):
        self.options = AveragingOptions.build("model averaging", options)
        self.replicas: Replicas | None = None
        self._step = 0
        self._figures = _Figures(self._metrics)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        seams.order_callbacks(first=self._figures, last=self)
        if args.world_size == 1:
            compatibility.single_process("model averaging")
            return
        model = kwargs["model"]
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._owner = checkpoint.Owner(self._FOLDER, names)
        agreed = self._agree()
        self._run, self._saves = agreed.run, 0
        comm = Communicator(ranks_per_node=self.options.ranks_per_node, hosts=agreed.hosts)
        self.replicas = Replicas(self.options, comm, names, model)
        self.replicas.moments.bind([innermost_optimizer(kwargs["optimizer"])])
        self._step = 0
        if state.global_step > 0:
            self._resume(args, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.replicas is not None:
            self.replicas.hide_consensus()
            self.replicas.prepare(local=True)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.replicas is not None:
            self.replicas.mark_diverged()  # whether gradients were shared is not known here
            self.replicas.after_step(self._step)
            self._step += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.replicas is not None and _evaluates_or_saves(control):
            self.replicas.show_consensus()

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.replicas is not None:
            self._saves += 1
            checkpoint.write(
                _checkpoint_folder(args, state) / self._FOLDER,
                self.replicas.comm,
                self._owner,
                f"{self._run}-{self._saves}",
                {"step": self._step, "replicas": self.replicas.state_dict()},
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.replicas is not None:
            self.replicas.synchronize()

    def _agree(self) -> agreement.Agreement:
        """The ranks may be anywhere in a script of their own, so they wait for each other as long as it takes."""
        ModelAveragingCallback._made += 1
        shapes = {f"parameter {name}": str(shape) for name, shape in self._owner.shapes().items()}
        own = {**fingerprint.of_options(self._FOLDER, self.options), **shapes}
        event = f"{self._FOLDER} {ModelAveragingCallback._made}"
        return agreement.compare(everyone(), event, self._FOLDER, lambda collect: own)

    def _metrics(self) -> dict[str, float]:
        return {PREFIX + name: value for name, value in self.replicas.metrics().items()} if self.replicas else {}

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self.replicas is not None
        self._step = state.global_step
        folder = _resumed_checkpoint(args, state)
        if folder is None:
            warn_once(_not_found("model averaging", args, state))
            return
        loaded = checkpoint.read(
            folder / self._FOLDER,
            self.replicas.comm,
            self._owner,
            lambda states: {"step": state.global_step, "replicas": Replicas.merge(s["replicas"] for s in states)},
        )
        if loaded is not None:
            self._step = loaded.state["step"]
            self.replicas.load_state_dict(loaded.state["replicas"])


class _Figures(TrainerCallback):
    """Adds figures to the training logs, ahead of the callbacks that report them."""

    def __init__(self, read: Callable[[], dict[str, float]]):
        self._read = read

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            figures = self._read()
            logs.update(figures)
            state.log_history[-1].update(figures)


def _evaluates_or_saves(control: TrainerControl) -> bool:
    """Whether Trainer evaluates, saves or ends right after this event."""
    return control.should_evaluate or control.should_save or control.should_training_stop


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _not_found(what: str, args: TrainingArguments, state: TrainerState) -> str:
    return (
        f"{what} starts afresh at step {state.global_step}: the checkpoint that Trainer resumed from is neither "
        f"args.resume_from_checkpoint nor below {args.output_dir}; set TrainingArguments(resume_from_checkpoint=...) to "
        "its folder to resume this as well"
    )


def _resumed_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Callbacks are not told which checkpoint was resumed; candidates are compared with the state it left behind."""
    candidates = [_checkpoint_folder(args, state)]
    if isinstance(args.resume_from_checkpoint, str):
        candidates.insert(0, Path(args.resume_from_checkpoint))
    for folder in candidates:
        file = folder / TRAINER_STATE
        if file.is_file() and TrainerState.load_from_json(str(file)).log_history == state.log_history:
            return folder
    return None

"""The script of a case, run by every rank: with a hook, or plainly. It notes what the oracle wants to know."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import FailingBackward, PlantedFailure, batch, distance, two_groups, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from accel_commhooks import attach, install
from accel_commhooks.attachment.slot import attachment_of
from accel_commhooks.config.errors import CommHookError

from .axes import HOOKS, Case
from .feedback import Feedback
from .plants import PLANTS
from .subjects import STEPS, at_step, build, logits_of

EVENT_AT = 5
OVERFLOWS = (3, 7)
DDP = {
    "default": {"bucket_cap_mb": 0.004},
    "find_unused": {"bucket_cap_mb": 0.004, "find_unused_parameters": True},
    "static_graph": {"bucket_cap_mb": 0.004, "static_graph": True},
    "bucket_view": {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True},
    "one_bucket": {"bucket_cap_mb": 100},
}


@dataclass
class Record:
    """What a rank saw."""

    refusal: str | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step, the replicas made equal."""
    counted: int = 0
    expected: int = 0
    """Steps that the hook counted, and that the script took, since the hook was attached."""
    sums: list[tuple[bool, float]] = field(default_factory=list)
    """After each step: whether ranks are promised to be equal, and a sum over their weights."""
    feedback: list[str] = field(default_factory=list)
    """What was wrong with residuals."""
    strays: int = 0
    """The script's own collectives that returned something else."""
    sent: int = 0
    load_kept: bool = True
    """Whether weights that were loaded stayed as they were."""


class Interrupt(BaseException):
    """As KeyboardInterrupt, which is no Exception."""


class Subclassed(torch.optim.AdamW):
    """Torch calls step hooks for it and, inside, for the class that it is made from."""

    def step(self, closure=None):
        return super().step(closure)


def run(rank: int, world_size: int, case: Case, hooked: bool, plant: str | None = None) -> Record:
    with PLANTS[plant]() if plant is not None else contextlib.nullcontext():
        return Script(rank, case, hooked).run()


class Script:
    def __init__(self, rank: int, case: Case, hooked: bool):
        self.rank, self.case, self.hooked = rank, case, hooked
        self.record, self.naps = Record(), random.Random(rank)
        self.handle: Any = None
        self.installation: Any = None
        self.feedback = Feedback()
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**10) if case["precision"] in ("scaler", "overflow") else None
        )

    # Parts.

    def wrap(self, model: nn.Module) -> None:
        self.model = model
        self.beside: Any = None
        if self.case["loop"] == "loss beside the outputs":
            model.register_forward_hook(self.keep_beside)
        options = dict(DDP[self.case["ddp"]])
        if self.case["model"] == "compiled":
            options["bucket_cap_mb"] = 100  # torch splits the graph at buckets, and cannot do so where they are tiny
        self.ddp = DistributedDataParallel(model, **options)

    def keep_beside(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The loss is made of what the model keeps; what it returns is only looked at."""
        self.beside = output
        return output * 1

    def make_optimizers(self) -> None:
        model, kind = self.ddp.module, self.case["optimizer"]
        # A large epsilon: Adam divides by the root of a gradient, and would blow up rounding where it is nearly zero.
        adam = {"lr": 0.01, "eps": 1e-2}
        if kind == "sgd":
            self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
        elif kind == "subclass":
            torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # gives AdamW.step its hooks
            self.optimizers = [Subclassed(model.parameters(), **adam)]
        elif kind == "adamw, two groups":
            self.optimizers = [torch.optim.AdamW(two_groups(model), **adam)]
        else:
            parameters = list(model.parameters())
            self.optimizers = [
                torch.optim.SGD(parameters[0::2], lr=0.05, momentum=0.9),
                torch.optim.AdamW(parameters[1::2], **adam),
            ]

    def attach(self) -> None:
        """Give the model its hook, unless an installation will do so at the next forward."""
        if not self.hooked or self.installation is not None:
            return
        name, options = HOOKS[self.case["hook"]]
        if self.case["way"] == "install":
            self.installation = install(name, **options)
            return
        given = self.case["way"] == "attach, optimizer given" and len(self.optimizers) == 1
        self.took(attach(self.ddp, name, optimizer=self.optimizers[0] if given else None, **options))

    def took(self, handle: Any) -> None:
        self.handle = handle
        self.record.expected = 0
        self.feedback.watch(handle)

    # The run.

    def run(self) -> Record:
        try:
            if self.case["way"] == "install":
                self.attach()
            self.wrap(build(self.case["model"]))
            self.make_optimizers()
            self.attach()
            for step in range(STEPS):
                if step == EVENT_AT:
                    self.event()
                at_step(self.case["model"], self.model, self.rank, step)
                self.step(step)
                self.note()
            self.finish()
        except CommHookError as error:
            self.record.refusal = str(error)
        finally:
            if self.installation is not None:
                self.installation.stop()
        return self.record

    def note(self) -> None:
        handle = self.handle
        replicas = getattr(getattr(handle, "hook", None), "replicas", None)
        equal = replicas is None or not replicas.diverged
        if equal and handle is not None:
            handle.synchronize()
        total = sum(float(p.detach().double().abs().sum()) for p in self.ddp.module.parameters())
        self.record.sums.append((equal, total))
        self.record.expected += 1

    def finish(self) -> None:
        record = self.record
        if self.handle is not None:
            record.counted = self.handle.steps
            self.handle.synchronize()
            record.sent = sum(self.handle.comm.traffic.sent.values())
            record.feedback = self.feedback.verdict()
            self.handle.detach()
        record.weights = weights(self.ddp)

    # One step.

    def loss(self, step: int, item: int = 0) -> torch.Tensor:
        time.sleep(self.naps.choice((0, 0, 0.001)))
        tokens, labels = batch(self.rank, 100 * step + item)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case["precision"] == "autocast"):
            output = self.ddp(tokens)
            logits = logits_of(output if self.beside is None else self.beside)
        if self.hooked and self.handle is None:  # installed at this first forward
            self.took(attachment_of(self.ddp))
        self.logits = logits
        loss = nn.functional.cross_entropy(logits.float(), labels)
        if self.case["precision"] == "overflow" and self.rank == 0 and step in OVERFLOWS:
            loss = loss * torch.inf
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        time.sleep(self.naps.choice((0, 0, 0.002)))
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, step: int) -> None:
        loop = self.case["loop"]
        if loop == "closure":
            self.closure_step(step)
            return
        if loop in ("discards", "discards in place") and step % 3 == 1:
            self.backward(50 * self.loss(step, 50))
            self.zero_grad(set_to_none=loop == "discards")
            self.feedback.discarded()
        if loop == "failing backwards" and step % 3 == 1:
            with contextlib.suppress(PlantedFailure):
                self.backward(FailingBackward.apply(self.loss(step, 60)))
            self.zero_grad()
        if loop == "interrupted forwards" and step % 3 == 1:
            handle = self.ddp.module.register_forward_pre_hook(_interrupt)
            with contextlib.suppress(Interrupt):
                self.loss(step, 61)
            handle.remove()
        self.backwards(step)
        if loop == "failing steps" and step % 3 == 1:
            self.fail_a_step()
            self.backwards(step)
        if loop == "gradients of inputs":
            # As a gradient penalty or a saliency map: no parameter gets a gradient.
            torch.autograd.grad(self.loss(step, 80), self.logits)
        if self.case["precision"] == "clipping":
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.5)
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        self.zero_grad(set_to_none=loop != "discards in place")
        self.after_step(step)

    def backwards(self, step: int) -> None:
        loop = self.case["loop"]
        if loop == "accumulation":
            for item in range(2):
                with self.ddp.no_sync():
                    self.backward(self.loss(step, item) / 3)
            self.backward(self.loss(step, 2) / 3)
        elif loop == "accumulation without no_sync":
            for item in range(2):
                self.backward(self.loss(step, item) / 2)
        elif loop == "averaging by hand":
            with self.ddp.no_sync():
                self.backward(self.loss(step))
            for parameter in self.ddp.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        elif loop == "two forwards":
            self.backward(self.loss(step) + self.loss(step, 1))
        elif loop == "bags":
            self.backward(sum(self.loss(step, item) for item in range(1 + (self.rank + step) % 3)))
        else:
            self.backward(self.loss(step))

    def fail_a_step(self) -> None:
        """Something in a step raises an error; the script clears the gradients and goes on."""

        def fail(*_):
            raise PlantedFailure

        handles = [optimizer.register_step_pre_hook(fail) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            with contextlib.suppress(PlantedFailure):
                optimizer.step()
        for handle in handles:
            handle.remove()
        self.zero_grad()
        self.feedback.discarded()

    def closure_step(self, step: int) -> None:
        (optimizer,) = self.optimizers

        def closure():
            optimizer.zero_grad()
            loss = self.loss(step)
            self.backward(loss)
            return loss

        optimizer.step(closure)

    def after_step(self, step: int) -> None:
        loop = self.case["loop"]
        if loop == "validation with grad":
            for item in range(self.rank):
                self.loss(step, 70 + item)
        elif loop == "evaluation":
            self.evaluate(forwards=self.rank + 1)
        elif loop == "own collectives":
            own = torch.full((7,), float(step))
            dist.all_reduce(own)
            self.record.strays += own.tolist() != [step * float(dist.get_world_size())] * 7

    def evaluate(self, forwards: int) -> None:
        self.ddp.eval()
        with torch.no_grad():
            for item in range(forwards):
                self.ddp(batch(self.rank, 90 + item)[0])
        self.ddp.train()

    # In mid-run.

    def event(self) -> None:
        kind = self.case["event"]
        if kind == "resume":
            self.resume()
        elif kind == "save" and self.handle is not None:
            self.handle.open_consensus()
            self.handle.prepare_save()
        elif kind == "rollback":
            self.rollback()
        elif kind == "detach and attach" and self.handle is not None:
            self.handle.detach()
            name, options = HOOKS[self.case["hook"]]
            self.took(attach(self.ddp, name, **options))
        elif kind == "copies":
            if self.handle is not None:
                self.handle.synchronize()
            copies = [copy.deepcopy(self.ddp), AveragedModel(self.ddp).module]
            if self.case["model"] != "compiled":  # torch does not pickle those
                copies.append(_pickled(self.ddp))
            for each in copies:
                logits_of(each.module(batch(self.rank, 0)[0])).sum().backward()
        elif kind == "wrapped anew":
            self.handle = None
            self.wrap(self.model)
            self.attach()
        elif kind == "weights loaded":
            self.load()
        elif kind == "consensus":
            with self.handle.consensus() if self.handle is not None else contextlib.nullcontext():
                self.evaluate(forwards=1)

    def rollback(self) -> None:
        """A few steps that are taken back, as by a search for a learning rate. Every rank keeps a snapshot in memory."""
        if self.handle is not None:
            self.handle.synchronize()
            self.handle.prepare_save()
        model = copy.deepcopy(self.ddp.module.state_dict())
        optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        for step in range(20, 22):
            at_step(self.case["model"], self.model, self.rank, EVENT_AT)
            self.step(step)
            self.record.expected += 1
        self.ddp.module.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)

    def load(self) -> None:
        """As ``load_best_model_at_end``: what is loaded is what there is then, whatever was under way."""
        self.ddp.module.load_state_dict(build(self.case["model"]).state_dict())
        loaded = weights(self.ddp)
        if self.handle is not None:
            self.handle.synchronize()
        self.record.load_kept = distance(loaded, weights(self.ddp)) == 0

    def resume(self) -> None:
        """Everything anew, from what was saved."""
        done = self.record.expected
        if self.handle is not None:
            self.handle.open_consensus()
            self.handle.prepare_save()
        saved = [
            {
                "model": self.ddp.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers] if self.rank == 0 else None,
                "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            }
        ]
        saved = copy.deepcopy(saved)
        dist.broadcast_object_list(saved, 0)
        own = _through_a_file(self.handle.state_dict()) if self.handle is not None else None
        if self.handle is not None:
            self.handle.detach()
        self.handle = None
        self.wrap(build(self.case["model"]))
        self.make_optimizers()
        self.attach()
        if self.handle is None and self.hooked:
            self.took(self.installation.attachment(self.ddp))
        self.ddp.module.load_state_dict(saved[0]["model"])
        for optimizer, state in zip(self.optimizers, saved[0]["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved[0]["scaler"])
        if self.handle is not None:
            self.handle.load_state_dict(own)
            self.feedback.restart()
        self.record.expected = done


def _interrupt(module, args):
    raise Interrupt


def _pickled(ddp):
    stream = io.BytesIO()
    torch.save(ddp, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def _through_a_file(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)

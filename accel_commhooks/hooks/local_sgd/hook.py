"""Post-local SGD (arXiv:1808.07217): plain DDP first, then local steps with an averaging now and then.

For ``start_localSGD_iter`` steps gradients are averaged over all ranks. From then on DDP does not communicate: nothing is
sent between nodes, not even DDP's own bitmaps and buffer broadcasts. Gradients are averaged inside the node (or another
subgroup) at the end of backward, and every ``period`` steps the replicas are averaged: see replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...comm.cost import Prediction, Problem
from ...comm.process_group import GradBucket
from ...comm.survivors import Group
from ...config.errors import ConfigError
from ...config.registry import register_hook
from ..base import HookContext, QueueHook, State
from .averaging import average_in_place
from .cost import post_localsgd_cost
from .options import PostLocalSGDOptions
from .replicas import Replicas


@register_hook("post_localsgd")
class PostLocalSGDHook(QueueHook):
    """Local steps with periodic averaging: 1/period of DDP's bytes, no waiting in between."""

    Options = PostLocalSGDOptions
    needs_optimizer = True
    optimizer_state_is_common = False

    @classmethod
    def cost(cls, options: Any, problem: Problem) -> Prediction:
        return post_localsgd_cost(options, problem)

    def __init__(self, options: PostLocalSGDOptions, context: HookContext):
        super().__init__(options, context)
        self._subgroup = self._make_subgroup(options)
        self.replicas = Replicas(options, self.comm, context.names, context.module)
        self._overdue: list[int] = []
        """Steps that ended when weights could not be written, and after which replicas may have to be averaged."""

    def _make_subgroup(self, options: PostLocalSGDOptions) -> Group:
        everyone_alone = [[rank] for rank in range(self.comm.size)]
        if not options.post_local_gradient_allreduce or options.subgroup == "none":
            return self.comm.subgroup(everyone_alone)
        if options.subgroup == "node":
            return self.comm.subgroup(self.comm.topology.nodes)
        groups = list(options.subgroup)
        if sum(map(len, groups)) != self.comm.size:
            raise ConfigError(f"subgroup must hold each of the {self.comm.size} ranks once, but got {groups!r}")
        return self.comm.subgroup(groups)

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.replicas.moments.bind(optimizers)

    # One step.

    def _is_local(self) -> bool:
        return self.step >= self.options.start_localSGD_iter

    def before_forward(self) -> None:
        self.replicas.restore_own()

    def begin_backward(self) -> None:
        self.replicas.prepare(local=self._is_local())

    def reduces_this_step(self) -> bool:
        return not self._is_local()

    def _gradient_group(self) -> Group:
        return self._subgroup if self._is_local() else self.comm.everyone

    def start(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        # DDP may be awake at a local step: a forward from before it, or one that somebody else has prepared (Lightning).
        return self.comm.all_reduce(bucket.buffer(), group=self._gradient_group()).wait

    def after_unreduced_backward(self, parameters: list[torch.Tensor]) -> None:
        """Average over the subgroup, with DDP's rule: a parameter that no rank used keeps no gradient."""
        group = self._gradient_group()
        if group.size == 1:
            return
        trainable = [p for p in parameters if p.requires_grad]
        missing = [p for p in trainable if p.grad is None]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        if self.context.finds_unused:
            gone = set(map(id, missing))
            flags = torch.tensor([float(id(p) not in gone) for p in trainable], device=trainable[0].device)
            self.comm.all_reduce(flags, group=group).wait()
            if missing:  # only a rank that needs the answer reads it from the device
                used = dict(zip(map(id, trainable), (flags > 0).tolist(), strict=True))
                missing = [p for p in missing if not used[id(p)]]
        else:
            missing = []  # plain DDP expects a gradient of every parameter, and so every rank steps every parameter
        gradients = [p.grad for p in trainable if p.grad is not None]
        average_in_place(self.comm, gradients, group=group)
        for parameter in missing:
            parameter.grad = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.replicas.prepare(local=self._is_local())  # a step may come without a backward of this model

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_local() and self._subgroup.size < self.comm.size:
            self.replicas.mark_diverged()

    def step_done(self, *, weights_in_use: bool = False) -> None:
        if self._is_local() and self._subgroup.size < self.comm.size:
            self.replicas.mark_diverged()
        self._overdue.append(self.step)
        super().step_done(weights_in_use=weights_in_use)
        if not weights_in_use:
            self.catch_up()

    def catch_up(self) -> None:
        overdue, self._overdue = self._overdue, []
        for step in overdue:
            averaged = self.replicas.after_step(step)
            if averaged and step >= self.options.start_localSGD_iter:
                self.context.averaged(self.options.cycle())

    def weights_loaded(self) -> None:
        self.replicas.weights_loaded()

    # Around the steps.

    def synchronize(self) -> None:
        self.replicas.synchronize()

    def begin_consensus(self) -> None:
        self.replicas.show_consensus()

    def end_consensus(self) -> None:
        self.replicas.hide_consensus()

    def metrics(self) -> dict[str, float]:
        return self.replicas.metrics()

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.replicas.common()

    def close(self) -> None:
        self.replicas.close()

    def state_dict(self) -> State:
        return {**super().state_dict(), "replicas": self.replicas.state_dict()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.replicas.load_state_dict(state["replicas"])

    def merge_states(self, states: Iterable[State]) -> State:
        first = next(iter(states))
        return {**first, "replicas": Replicas.merge([first["replicas"]])}

"""Replicas that train apart and are averaged periodically.

:class:`Replicas` knows when the ranks' models are averaged and what happens then: plain means, an outer optimizer on the
averaged change, means that arrive some steps later, the inner optimizer's moments, floating-point buffers. It also shows
the consensus to whoever evaluates or saves, and keeps what a resumed run needs to continue exactly: each rank's own
weights and moments where they differ.

The post_localsgd hook and ModelAveragingCallback both use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...comm.collectives import Communicator, Group
from ...config.errors import ConfigError
from .averaging import average_in_place
from .changes import ChangeAverager
from .distance import Distance
from .options import AveragingOptions
from .schedule import HierarchicalSchedule, PeriodicSchedule, Schedule


class Replicas:
    """The averaging of one model's replicas."""

    def __init__(
        self,
        options: AveragingOptions,
        comm: Communicator,
        names: dict[torch.Tensor, str],
        buffers: dict[str, torch.Tensor],
    ):
        self.options, self.comm = options, comm
        self._names, self._buffers = names, buffers
        warmup = options.warmup_steps or 0
        self._schedule: Schedule = (
            HierarchicalSchedule(comm, options.period_group_size, warmup)
            if options.period_group_size
            else PeriodicSchedule(comm, options.period, warmup)
        )
        self._changes = ChangeAverager(options, comm)
        self.diverged = False
        """Whether ranks may hold different weights now; the same answer on every rank."""
        self._due: int | None = None
        self._moments_differ = False
        self._local: list[torch.Tensor] = []
        self._pending_state: dict[str, Any] = {}
        self._distance: torch.Tensor | None = None
        self.optimizers: list[torch.optim.Optimizer] = []

    # One step.

    def before_step(self, *, local: bool) -> None:
        """Apply a loaded state; take the first anchor where ``local`` steps begin."""
        if self._pending_state:
            self._apply_state()
        if local and self.options.averages_changes() and not self._changes.anchor:
            self._changes.anchor = {name: p.detach().clone() for name, p in self._trainable().items()}

    def mark_diverged(self) -> None:
        """A step was taken without the other ranks."""
        self.diverged = self._moments_differ = True

    def after_step(self, step: int) -> None:
        """Average if the ``step``-th step (from 0) is one to average after. Every rank calls it for every step."""
        if self.options.averager is not None:
            self._run_foreign_averager()
            return
        if self._due is not None and step >= self._due:
            self._receive_change()
        group = self._schedule.group_at(step)
        if group is None:
            return
        everyone = group.size == self.comm.size
        if self.options.overlap_steps:
            self._changes.send(self._trainable())
            self._due = step + self.options.overlap_steps
        elif self.options.averages_changes() and everyone:
            self._distance = self._changes.average(self._trainable()).relative()
        elif self.diverged:
            self._average_plainly(group)
        self._average_rest(group)
        if everyone and not self.options.overlap_steps:
            self.diverged = False
            self._moments_differ &= self.options.optimizer_state == "keep"

    def synchronize(self) -> None:
        """Make the replicas equal, permanently."""
        if self._due is not None:
            self._receive_change()
        if self.diverged:
            self._average_plainly(self.comm.everyone)
            self._average_buffers(self.comm.everyone)
            self.diverged = False
        self._local = []

    def show_consensus(self) -> None:
        """Make every rank's weights the mean of the replicas, until :meth:`hide_consensus`."""
        if not self.options.restore_local:
            self.synchronize()
        elif self.diverged and not self._local:
            self._local = [tensor.detach().clone() for tensor in self._shown()]
            self._average_plainly(self.comm.everyone)
            self._average_buffers(self.comm.everyone)

    def hide_consensus(self) -> None:
        """Put each rank's own weights back, if that was asked for."""
        for tensor, local in zip(self._shown(), self._local, strict=False):
            tensor.detach().copy_(local)
        self._local = []

    def metrics(self) -> dict[str, float]:
        return {} if self._distance is None else {"replica_distance": float(self._distance)}

    # Means.

    def _trainable(self) -> dict[str, torch.Tensor]:
        return {name: p for p, name in self._names.items() if p.requires_grad}

    def _float_buffers(self) -> list[torch.Tensor]:
        return [buffer for buffer in self._buffers.values() if buffer.is_floating_point()]

    def _shown(self) -> list[torch.Tensor]:
        return [*self._trainable().values(), *self._float_buffers()]

    def _average_plainly(self, group: Group) -> None:
        distance = Distance()
        average_in_place(self.comm, list(self._trainable().values()), group=group, observe=distance.add)
        self._distance = distance.relative()

    def _receive_change(self) -> None:
        self._distance = self._changes.receive().relative()
        self._due = None

    def _average_rest(self, group: Group) -> None:
        self._average_buffers(group)
        if self.options.optimizer_state == "average":
            average_in_place(self.comm, self._moments(), group=group)
        elif self.options.optimizer_state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _average_buffers(self, group: Group) -> None:
        if self.options.buffers == "average":
            average_in_place(self.comm, self._float_buffers(), group=group)
        elif self.options.buffers == "broadcast":
            for buffer in self._float_buffers():
                self.comm.broadcast(buffer, group=group).wait()

    def _moments(self) -> list[torch.Tensor]:
        """The optimizers' per-element state, in the model's order, which is the same on every rank."""
        found = []
        for parameter in self._trainable().values():
            for optimizer in self.optimizers:
                state = optimizer.state.get(parameter, {})
                found += [
                    state[key]
                    for key in sorted(state)
                    if isinstance(state[key], torch.Tensor) and state[key].shape == parameter.shape
                ]
        return found

    def _run_foreign_averager(self) -> None:
        """Run the user's or torch's ModelAverager; torch's skip parameters without a gradient."""
        before = self.options.averager.step
        self.options.averager.average_parameters(iter(self._trainable().values()))
        if self.options.averager.step == before:
            raise ConfigError("the averager did not count its step; average_parameters must increase .step by one")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share (anchor, outer momentum) and, while replicas differ, this rank's own weights and moments."""
        state: dict[str, Any] = {
            "diverged": self.diverged,
            "due": self._due,
            "own": {},
            **self._changes.state_dict(),
        }
        if self.options.averager is not None:
            state["averager_step"] = self.options.averager.step
        if self._local:
            names = [*self._trainable(), *(n for n, b in self._buffers.items() if b.is_floating_point())]
            state["own"]["weights"] = {n: t.clone() for n, t in zip(names, self._local, strict=True)}
        if self._moments_differ:
            state["own"]["moments"] = self._own_moments()
        return state

    def _own_moments(self) -> dict[str, dict[str, Any]]:
        moments = {}
        for parameter, name in self._names.items():
            for optimizer in self.optimizers:
                if parameter in optimizer.state:
                    kept = optimizer.state[parameter]
                    moments[name] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        return moments

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Applied before the next step, because the model and the optimizer may be loaded after the hook."""
        self._pending_state = state

    def _apply_state(self) -> None:
        state, self._pending_state = self._pending_state, {}
        parameters = self._trainable()
        self.diverged = state["diverged"]
        self._changes.load_state_dict(state, parameters)
        if self.options.averager is not None and "averager_step" in state:
            self.options.averager.step = state["averager_step"]
        with torch.no_grad():
            for name, own in state["own"].get("weights", {}).items():
                target_tensor = parameters.get(name, self._buffers.get(name))
                if target_tensor is not None:
                    target_tensor.copy_(own)
        for parameter, name in self._names.items():
            for optimizer in self.optimizers:
                if name in state["own"].get("moments", {}) and parameter in optimizer.state:
                    optimizer.state[parameter].update(
                        {
                            k: v.to(optimizer.state[parameter][k]) if isinstance(v, torch.Tensor) else v
                            for k, v in state["own"]["moments"][name].items()
                        }
                    )
        self._moments_differ = "moments" in state["own"]
        self._due = state["due"]
        if self._due is not None:
            self._changes.resend(parameters)

    @staticmethod
    def merge(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """At another world size every rank starts from the consensus, which is what the checkpoint's weights are."""
        state = dict(next(iter(states)))
        return {**state, "diverged": False, "own": {}, "due": None, "sent": {}}

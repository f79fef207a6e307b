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

from ...comm.collectives import Communicator
from ...comm.survivors import Group
from ...config.errors import ConfigError
from ...upstream.devices import copies_on_host
from .averaging import average_in_place
from .changes import ChangeAverager
from .distance import Distance
from .moments import Moments
from .options import AveragingOptions
from .schedule import HierarchicalSchedule, PeriodicSchedule, Schedule


class Replicas:
    """The averaging of one model's replicas."""

    def __init__(
        self,
        options: AveragingOptions,
        comm: Communicator,
        names: dict[torch.Tensor, str],
        module: torch.nn.Module,
    ):
        self.options, self.comm = options, comm
        self._names, self._module = names, module
        warmup = options.warmup_steps or 0
        self._schedule: Schedule = (
            HierarchicalSchedule(comm, options.period_group_size, warmup)
            if options.period_group_size
            else PeriodicSchedule(comm, options.period, warmup)
        )
        self._changes = ChangeAverager(options, comm)
        self.moments = Moments(comm, names)
        self.diverged = False
        """Whether ranks may hold different weights now; the same answer on every rank."""
        self._trained: set[str] = set()
        """Parameters that were trainable in some local step. Frozen later, they may still move, by momentum."""
        self._due: int | None = None
        self._local: dict[str, torch.Tensor] = {}
        self._pending_state: dict[str, Any] = {}
        self._own_moments: dict[str, Any] = {}
        """Of a loaded state, until the optimizers are known, which may be after the first forward."""
        self._to_resend = False
        self._rebase = False
        """Whether weights were replaced, so that ranks have no anchor in common until they have averaged once."""
        self._distance: torch.Tensor | None = None

    # One step.

    def restore_own(self) -> None:
        """Apply a loaded state: weights of this rank's own. Before a forward; nothing is communicated."""
        if self._pending_state:
            self._apply_state()

    def prepare(self, *, local: bool) -> None:
        """A backward or a step begins: take anchors where ``local`` steps begin, go on with a change that was under way."""
        self.restore_own()
        if self._own_moments:
            self.moments.load_state_dict(self._own_moments)
            self._own_moments = {}
        if self._to_resend:
            self._to_resend = False
            self._changes.resend(self._parameters())
        if local:
            self._trained.update(self._trainable())
            if self.options.averages_changes() and not self._rebase:
                self._changes.take_anchors(self._trainable())

    def mark_diverged(self) -> None:
        """A step was taken without the other ranks."""
        self.diverged = self.moments.differ = True

    def after_step(self, step: int) -> bool:
        """Average if the ``step``-th step (from 0) is one to average after. Every rank calls it for every step.

        Returns whether all ranks have averaged, or sent what they average.
        """
        if self.options.averager is not None:
            self._run_foreign_averager()
            return False
        if self._due is not None and step >= self._due:
            self._receive_change()
        group = self._schedule.group_at(step)
        if group is None:
            if self._due is not None:
                self._advance(step)
            return False
        everyone = group.size == self.comm.size
        if self._rebase and everyone:
            self._average_plainly(group)
            self.diverged = False
            self._changes.take_anchors(self._parameters())
            self._rebase = False
        elif self.options.overlap_steps:
            self._changes.send(self._parameters())
            self._due = step + self.options.overlap_steps
            self._advance(step)
        elif self.options.averages_changes() and everyone:
            self._distance = self._changes.average(self._parameters()).relative()
        elif self.diverged:
            self._average_plainly(group)
        self._average_rest(group)
        if everyone and not self.options.overlap_steps:
            self.diverged = False
            self.moments.differ &= self.options.optimizer_state == "keep"
        return everyone

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        """What all ranks hold alike: anchors and outer momentum, and weights while they do not train apart."""
        if self.options.averager is not None:
            return {}
        shown = not self.diverged or bool(self._local)
        weights = self._parameters() if shown else {}
        return {"weights": weights, "anchor": self._changes.anchor, "outer momentum": self._changes.momentum}

    def synchronize(self) -> None:
        """Make the replicas equal, permanently."""
        if self._due is not None:
            self._receive_change()
        if self.diverged:
            self._average_plainly(self.comm.everyone)
            self._average_buffers(self.comm.everyone)
            self.diverged = False
        self._local = {}

    def close(self) -> None:
        """Leave replicas equal in everything that plain DDP goes on with."""
        self.synchronize()
        if self.moments.differ:
            self.moments.equalise()

    def weights_loaded(self) -> None:
        """Somebody has replaced weights: what refers to the old ones is of no use any more."""
        if self._pending_state:
            return  # a resume: hook, model and optimizer are loaded in any order
        self._changes.cancel()
        self._due = None
        self._rebase = self.options.averages_changes()
        self._local = {}

    def show_consensus(self) -> None:
        """Make every rank's weights the mean of the replicas, until :meth:`hide_consensus`."""
        if not self.options.restore_local:
            self.synchronize()
        elif self.diverged and not self._local:
            self._local = {name: tensor.detach().clone() for name, tensor in self._shown().items()}
            self._average_plainly(self.comm.everyone)
            self._average_buffers(self.comm.everyone)

    def hide_consensus(self) -> None:
        """Put each rank's own weights back, if that was asked for."""
        shown = self._shown() if self._local else {}
        for name, local in self._local.items():
            if name in shown:
                shown[name].detach().copy_(local)
        self._local = {}

    def metrics(self) -> dict[str, float]:
        return {} if self._distance is None else {"replica_distance": float(self._distance)}

    # Means.

    def _trainable(self) -> dict[str, torch.Tensor]:
        return {name: p for p, name in self._names.items() if p.requires_grad}

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Parameters that may differ between ranks, in the model's order."""
        return {name: p for p, name in self._names.items() if p.requires_grad or name in self._trained}

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        """Asked of the module each time: a script may assign a new tensor."""
        return {name: buffer for name, buffer in self._module.named_buffers() if buffer.is_floating_point()}

    def _shown(self) -> dict[str, torch.Tensor]:
        return {**self._parameters(), **self._float_buffers()}

    def _average_plainly(self, group: Group) -> None:
        distance = Distance()
        average_in_place(self.comm, list(self._parameters().values()), group=group, observe=distance.add)
        self._distance = distance.relative()

    def _advance(self, step: int) -> None:
        """By the last step before it is due, all of a change is on its way."""
        assert self._due is not None
        self._changes.advance(1 - (self._due - step - 1) / self.options.overlap_steps)

    def _receive_change(self) -> None:
        self._distance = self._changes.receive().relative()
        self._due = None

    def _average_rest(self, group: Group) -> None:
        self._average_buffers(group)
        if self.options.optimizer_state == "average":
            self.moments.average(group)
        elif self.options.optimizer_state == "reset":
            self.moments.reset()

    def _average_buffers(self, group: Group) -> None:
        if self.options.buffers == "average":
            average_in_place(self.comm, list(self._float_buffers().values()), group=group)
        elif self.options.buffers == "broadcast":
            for buffer in self._float_buffers().values():
                self.comm.broadcast(buffer, group=group).wait()

    def _run_foreign_averager(self) -> None:
        """Run the user's or torch's ModelAverager; torch's skip parameters without a gradient."""
        before = self.options.averager.step
        self.options.averager.average_parameters(iter(self._trainable().values()))
        if self.options.averager.step == before:
            raise ConfigError("the averager did not count its step; average_parameters must increase .step by one")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share (anchor, outer momentum) and, while replicas differ, this rank's own weights and moments."""
        if self._pending_state:
            return dict(self._pending_state)
        state: dict[str, Any] = {
            "diverged": self.diverged,
            "due": self._due,
            "own": {},
            **self._changes.state_dict(),
        }
        if self.options.averager is not None:
            state["averager_step"] = self.options.averager.step
        if self._local:
            state["own"]["weights"] = copies_on_host(self._local)
        if self.moments.differ:
            state["own"]["moments"] = self._own_moments or self.moments.state_dict()
        return state

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
        buffers = self._float_buffers()
        with torch.no_grad():
            for name, own in state["own"].get("weights", {}).items():
                target_tensor = parameters.get(name, buffers.get(name))
                if target_tensor is not None:
                    target_tensor.copy_(own)
        self._own_moments = state["own"].get("moments", {})
        self.moments.differ = "moments" in state["own"]
        self._due = state["due"]
        self._rebase = self.options.averages_changes() and self.diverged and not self._changes.anchor
        self._to_resend = self._due is not None

    @staticmethod
    def merge(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """At another world size every rank starts from the consensus, which is what the checkpoint's weights are."""
        state = dict(next(iter(states)))
        return {**state, "diverged": False, "own": {}, "due": None, "sent": {}}

"""Replicas that train apart and meet now and then: local SGD's other half.

:class:`Replicas` knows when the ranks' models are averaged and what happens then: plain means, an outer optimizer on the
averaged change (SlowMo, arXiv:1910.00643; DiLoCo, arXiv:2311.08105), means that arrive some steps later, the inner
optimizer's moments, floating-point buffers. It also shows the consensus to whoever evaluates or saves, and remembers what a
resumed run needs to be the same run: each rank's own weights and moments where they differ.

The post_localsgd hook and ModelAveragingCallback are two doors to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...comm.collectives import WIRE_DTYPES, Communicator, Group
from ...config.errors import ConfigError, nearest
from ...config.options import HookOptions, option
from .averaging import Exchange, HierarchicalSchedule, PeriodicSchedule, Piece, Schedule, average_in_place

_OUTER_DEFAULTS = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}


def _is_outer(value: dict) -> str | None:
    for key in value:
        if key not in _OUTER_DEFAULTS:
            return f"outer has the keys name, lr and momentum, but got {key!r}{nearest(str(key), _OUTER_DEFAULTS)}"
    filled = {**_OUTER_DEFAULTS, **value}
    if filled["name"] not in ("sgd", "nesterov"):
        return f"outer.name must be one of sgd, nesterov, but got {filled['name']!r}"
    for key, low, high in (("lr", 0.0, float("inf")), ("momentum", 0.0, 1.0)):
        number = filled[key]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not low <= number < high:
            return f"outer.{key} must be a number of at least {low:g} and below {high:g}, but got {number!r}"
    return None


def _is_hierarchy(value: dict) -> str | None:
    if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for pair in value.items() for n in pair):
        return None
    return f"period_group_size must map whole numbers to whole numbers, for example {{2: 4, 16: 32}}, but got {value!r}"


@dataclass(kw_only=True)
class AveragingOptions(HookOptions):
    period: int = option(8, "Optimizer steps between two averagings.", at_least=1)
    warmup_steps: int | None = option(0, "Steps before the first averaging.", at_least=0)
    period_group_size: dict = option(
        {}, "Averaging in levels, in place of period: {2: 4, 16: 32} means every 2 steps among 4 ranks, every 16 among 32.",
        check=_is_hierarchy,
    )  # fmt: skip
    averager: Any = option(None, "A torch ModelAverager to run instead (from Python only).")
    buffers: str = option(
        "average",
        "Floating-point buffers (batch norm) at an averaging: average, keep, or broadcast rank 0's.",
        choices=("average", "keep", "broadcast"),
    )
    outer: dict = option(
        {}, "Optimizer on the averaged change: {name: sgd | nesterov, lr: 0.7, momentum: 0.9}; empty means a plain mean.",
        check=_is_outer,
    )  # fmt: skip
    wire_dtype: str | None = option(
        None, "Type in which changes since the last averaging travel: fp16 or bf16.", choices=(None, "fp16", "bf16")
    )
    optimizer_state: str = option(
        "keep",
        "The inner optimizer's moments at an averaging: keep, average or reset.",
        choices=("keep", "average", "reset"),
    )
    overlap_steps: int = option(0, "Steps over which an averaging may travel in the background.", at_least=0)
    restore_local: bool = option(False, "Put each rank's own weights back after an evaluation or a save.")

    def check(self) -> None:
        if self.overlap_steps >= self.period and not self.period_group_size:
            raise ConfigError(
                f"overlap_steps must be below period, so that an averaging arrives before the next one starts, but got "
                f"{self.overlap_steps} and {self.period}"
            )
        if self.overlap_steps and (self.period_group_size or self.averager is not None):
            raise ConfigError(
                f"overlap_steps works with one period for all ranks, but got {self.overlap_steps} beside "
                f"{'averager' if self.averager is not None else 'period_group_size'}; set overlap_steps: 0"
            )
        if self.averager is not None and not hasattr(self.averager, "average_parameters"):
            raise ConfigError(
                f"averager must be a torch ModelAverager, but got {self.averager!r}; from YAML use period and warmup_steps"
            )


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
        plain_mean: dict[str, Any] = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
        outer = {**_OUTER_DEFAULTS, **options.outer} if options.outer else plain_mean
        self._lr, self._momentum_factor, self._nesterov = outer["lr"], outer["momentum"], outer["name"] == "nesterov"
        self._wire_dtype = WIRE_DTYPES[options.wire_dtype]
        # A plain mean needs no memory. A narrow wire carries changes, because weights would lose too many digits.
        self._by_change = bool(options.outer) or self._wire_dtype is not None or options.overlap_steps > 0
        self.diverged = False
        """Whether ranks may hold different weights now; the same answer on every rank."""
        self._anchor: dict[str, torch.Tensor] = {}
        self._momentum: dict[str, torch.Tensor] = {}
        self._sent: dict[str, torch.Tensor] = {}
        self._exchange: Exchange | None = None
        self._due: int | None = None
        self._moments_differ = False
        self._local: list[torch.Tensor] = []
        self._pending_state: dict[str, Any] = {}
        self._distance: torch.Tensor | None = None
        self._arriving_distance = _Distance()
        self.optimizers: list[torch.optim.Optimizer] = []

    # The life of a step.

    def before_step(self, *, local: bool) -> None:
        """Put a loaded state in place; take the first anchor where ``local`` steps begin."""
        if self._pending_state:
            self._apply_state()
        if local and self._by_change and not self._anchor:
            self._anchor = self._copy_parameters()

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
            self._send_change()
            self._due = step + self.options.overlap_steps
        elif self._by_change and everyone:
            self._average_change()
        elif self.diverged:
            self._average_plainly(group)
        self._average_rest(group)
        if everyone and not self.options.overlap_steps:
            self.diverged = False
            self._moments_differ &= self.options.optimizer_state == "keep"

    def synchronize(self) -> None:
        """Make the replicas equal, for good."""
        if self._due is not None:
            self._receive_change()
        if self.diverged:
            self._average_plainly(self.comm.everyone)
            self._average_buffers(self.comm.everyone)
            self.diverged = False
        self._local = []

    def show_consensus(self) -> None:
        """Let everyone see the mean of the replicas, until :meth:`hide_consensus`."""
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

    def _copy_parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self._trainable().items()}

    def _average_plainly(self, group: Group) -> None:
        distance = _Distance()
        average_in_place(self.comm, list(self._trainable().values()), group=group, observe=distance.add)
        self._distance = distance.relative()

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
        """A ModelAverager of the user's or torch's; those of torch skip parameters without a gradient."""
        before = self.options.averager.step
        self.options.averager.average_parameters(iter(self._trainable().values()))
        if self.options.averager.step == before:
            raise ConfigError("the averager did not count its step; average_parameters must increase .step by one")

    # Changes since the last averaging. An anchor is where all ranks were then; it moves by the outer step.

    def _average_change(self) -> None:
        """Blocking: every rank goes to the new anchor. Only slices are in memory, beside anchor and momentum."""
        names, parameters = list(self._trainable()), list(self._trainable().values())
        distance = _Distance()

        def read(piece: Piece) -> torch.Tensor:
            return piece.of(parameters[piece.index]) - piece.of(self._anchor[names[piece.index]])

        def write(piece: Piece, change: torch.Tensor) -> None:
            anchor, own = piece.of(self._anchor[names[piece.index]]), piece.of(parameters[piece.index])
            distance.add(own, anchor + change)
            own.copy_(self._move_anchor(names[piece.index], piece, change))

        Exchange(self.comm, parameters, read, write, wire_dtype=self._wire_dtype).run()
        self._distance = distance.relative()

    def _send_change(self) -> None:
        """Overlapped: the change travels while local steps go on."""
        self._sent = self._copy_parameters()
        self._launch()

    def _launch(self) -> None:
        parameters = {name: p for name, p in self._trainable().items() if name in self._sent}
        names, targets = list(parameters), list(parameters.values())
        distance = self._arriving_distance = _Distance()

        def read(piece: Piece) -> torch.Tensor:
            return piece.of(self._sent[names[piece.index]]) - piece.of(self._anchor[names[piece.index]])

        def write(piece: Piece, change: torch.Tensor) -> None:
            name = names[piece.index]
            sent = piece.of(self._sent[name])
            distance.add(sent, piece.of(self._anchor[name]) + change)
            # As far as this rank was off the new anchor when it sent, so far it is moved now.
            piece.of(targets[piece.index]).add_(self._move_anchor(name, piece, change) - sent)

        self._exchange = Exchange(self.comm, targets, read, write, wire_dtype=self._wire_dtype)
        self._exchange.start()

    def _receive_change(self) -> None:
        assert self._exchange is not None
        self._exchange.finish()
        self._distance = self._arriving_distance.relative()
        self._exchange, self._sent, self._due = None, {}, None

    def _move_anchor(self, name: str, piece: Piece, change: torch.Tensor) -> torch.Tensor:
        """The outer optimizer: SGD on the negative averaged change, momentum as torch.optim.SGD has it."""
        if self._momentum_factor:
            if name not in self._momentum:
                self._momentum[name] = torch.zeros_like(self._anchor[name])
            momentum = piece.of(self._momentum[name]).mul_(self._momentum_factor).add_(change)
            change = change + self._momentum_factor * momentum if self._nesterov else momentum
        return piece.of(self._anchor[name]).add_(change, alpha=self._lr)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What is common to the ranks (anchor, outer momentum) and, while they differ, what is this rank's own."""
        state: dict[str, Any] = {
            "diverged": self.diverged,
            "anchor": _clone(self._anchor),
            "momentum": _clone(self._momentum),
            "due": self._due,
            "sent": _clone(self._sent),
            "own": {},
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
        """Taken over before the next step: the model and the optimizer may be loaded after the hook."""
        self._pending_state = state

    def _apply_state(self) -> None:
        state, self._pending_state = self._pending_state, {}
        parameters = self._trainable()
        self.diverged = state["diverged"]
        for target, kept in ((self._anchor, "anchor"), (self._momentum, "momentum"), (self._sent, "sent")):
            target.clear()
            target.update({n: t.to(parameters[n], copy=True) for n, t in state[kept].items() if n in parameters})
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
            self._launch()

    @staticmethod
    def merge(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """At another world size: from the consensus, which is what the checkpoint's weights are."""
        state = dict(next(iter(states)))
        return {**state, "diverged": False, "own": {}, "due": None, "sent": {}}


class _Distance:
    """How far this rank is from the mean, relative to the mean's size; summed on the device."""

    def __init__(self) -> None:
        self._apart: torch.Tensor | None = None
        self._size: torch.Tensor | None = None

    def add(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        apart = torch.linalg.vector_norm((own - mean).float()).square()
        size = torch.linalg.vector_norm(mean.float()).square()
        self._apart = apart if self._apart is None else self._apart + apart
        self._size = size if self._size is None else self._size + size

    def relative(self) -> torch.Tensor | None:
        if self._apart is None or self._size is None:
            return None
        return (self._apart / self._size.clamp_min(1e-30)).sqrt()


def _clone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}

"""The inner optimizers' state, of which every rank has its own while replicas train apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...comm.collectives import Communicator
from ...comm.survivors import Group
from ...upstream.devices import copies_on_host
from .averaging import average_in_place


class Moments:
    """State with an element for each of a parameter's (moments), and the rest (counters), by the parameters' names."""

    def __init__(self, comm: Communicator, names: dict[torch.Tensor, str]):
        self._comm, self._names = comm, names
        self._optimizers: list[torch.optim.Optimizer] = []
        """Held, so that ranks average the state of the same ones, whenever their garbage collectors run."""
        self._keys: list[list[str]] = []
        """Names of the moments of each optimizer, the same on every rank."""
        self.differ = False
        """Whether ranks may hold different state now; the same answer on every rank."""

    def bind(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """The optimizers, in the same order on every rank."""
        self._optimizers, self._keys = optimizers, []

    def reset(self) -> None:
        """Start afresh."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def average(self, group: Group) -> None:
        """Average the moments of trainable parameters. A rank that has none, because it did not use a part, counts as zero."""
        moments = []
        for parameter, optimizer, keys in self._held():
            state = optimizer.state.get(parameter, {})
            moments += [state[key] if key in state else torch.zeros_like(parameter) for key in keys]
        average_in_place(self._comm, moments, group=group)

    def equalise(self) -> None:
        """Give every rank the same state for good: mean moments, and the counters of the rank that stepped most."""
        held = list(self._held(frozen=True))
        everyones = self._comm.gather_objects([self._counters(o, p) for p, o, _ in held])
        moments = []
        for (parameter, optimizer, keys), counters in zip(held, zip(*everyones, strict=True), strict=True):
            if not any(stepped for stepped, _ in counters):
                continue
            state = optimizer.state[parameter]
            for key in keys:
                moments.append(state.setdefault(key, torch.zeros_like(parameter)))
            _, furthest = max(counters, key=lambda each: (each[0], float(each[1].get("step", 0))))
            for key, value in furthest.items():
                own = state.get(key)
                state[key] = value.to(own.device) if isinstance(own, torch.Tensor) else value
        average_in_place(self._comm, moments)
        self.differ = False

    def _held(self, *, frozen: bool = False) -> Iterator[tuple[torch.Tensor, torch.optim.Optimizer, list[str]]]:
        """(parameter, its optimizer, names of its moments) of trainable or of all parameters, in the model's order."""
        if not self._keys or not all(self._keys):
            # A rank may not have used a part of the model yet, so all ranks tell what kinds of moments there are.
            told = self._comm.gather_objects([_moment_names(optimizer) for optimizer in self._optimizers])
            self._keys = [sorted(set().union(*names)) for names in zip(*told, strict=True)]
        of = [{id(p) for group in o.param_groups for p in group["params"]} for o in self._optimizers]
        for parameter in self._names:
            for optimizer, parameters, keys in zip(self._optimizers, of, self._keys, strict=True):
                if (parameter.requires_grad or frozen) and id(parameter) in parameters:
                    yield parameter, optimizer, keys

    def _counters(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[bool, dict[str, Any]]:
        """(whether a parameter has been stepped on this rank, what there is of it besides moments)"""
        state = optimizer.state.get(parameter, {})
        counters = {k: v for k, v in state.items() if not _is_moment(k, v, parameter)}
        return bool(state), {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in counters.items()}

    # Checkpoints.

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """This rank's own state."""
        kept = {}
        for parameter, name in self._names.items():
            for optimizer in self._optimizers:
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
                    kept[name] = {**state, **copies_on_host(tensors)}
        return kept

    def load_state_dict(self, kept: dict[str, dict[str, Any]]) -> None:
        """Put this rank's own state in the place of what the optimizers have loaded, which is another rank's."""
        for optimizer in self._optimizers:
            for parameter in [p for group in optimizer.param_groups for p in group["params"] if p in self._names]:
                own = kept.get(self._names[parameter])
                if own is None:
                    optimizer.state.pop(parameter, None)
                    continue
                state = optimizer.state[parameter]
                for key, value in own.items():
                    if key in state and isinstance(value, torch.Tensor):
                        value = value.to(state[key])
                    elif _is_moment(key, value, parameter):
                        value = value.to(parameter.device)
                    state[key] = value


def _moment_names(optimizer: torch.optim.Optimizer) -> set[str]:
    return {k for p, state in optimizer.state.items() for k, v in state.items() if _is_moment(k, v, p)}


def _is_moment(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """A counter looks like a moment of a parameter without dimensions."""
    return key != "step" and isinstance(value, torch.Tensor) and value.shape == parameter.shape

"""What a hook that compresses remembers from step to step, by parameter name.

What is compressed together is a unit. While it is in use the memory points into it; when what belongs together changes, as when
DDP rebuilds its buckets, new units are filled from the old ones by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from ..upstream import foreach
from ..upstream.devices import copies_on_host

State = dict[str, Any]


class Unit(Protocol):
    """What is compressed together, as far as it is remembered."""

    def errors(self) -> list[torch.Tensor]:
        """Its residuals."""
        ...

    def remembered(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(kind, parameter, tensor) of everything that outlives a step; residuals are of the kind ``error``."""
        ...


class Memory:
    """What outlives a step: residuals, and whatever else there is, by kind and by parameter name.

    A backward changes residuals at once, but its gradients may be cleared without a step: a generator's loss goes through
    the discriminator, SAM looks ahead. Then residuals must be as they were before. A copy of them is kept from the first
    time on that gradients are discarded; scripts that never do so do not pay for it.
    """

    def __init__(self, *kinds: str) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
        self.keeps_copies = False
        """Whether gradients have been discarded before."""
        self._changed: dict[int, Unit] = {}
        """Units whose residuals have changed since the last step, by id."""
        self._before: weakref.WeakKeyDictionary[Unit, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        """Their residuals as they were before. Not by id: a new unit may get that of one that is gone."""

    def before_change(self, unit: Unit) -> None:
        """The residuals of a unit are about to change; called for the first time since a step or again."""
        if id(unit) in self._changed:
            return
        self._changed[id(unit)] = unit
        if self.keeps_copies:
            errors = unit.errors()
            if unit not in self._before:
                self._before[unit] = [torch.empty_like(error) for error in errors]
            foreach.copy(self._before[unit], errors)

    def commit(self) -> None:
        """A step was taken: what has changed stays."""
        self._changed = {}

    def roll_back(self, kept: torch.Tensor | None) -> None:
        """Residuals become what they were at the last step, unless ``kept`` says on the device that they must stay.

        Without a copy of them, the first time, they become zero.
        """
        for unit in self._changed.values():
            errors = unit.errors()
            copies = self._before.get(unit) or [error.new_zeros(()) for error in errors]
            for error, copy in zip(errors, copies, strict=True):
                error.copy_(copy if kept is None else torch.where(kept, error, copy))
        self.keeps_copies = True
        if kept is None:
            self._changed = {}

    def move_into(self, unit: Unit) -> None:
        """Fill a new unit with what is known of its parameters."""
        for kind, name, tensor in unit.remembered():
            old = self._kept[kind].get(name)
            if old is not None and old.numel() == tensor.numel():
                tensor.copy_(old.reshape(tensor.shape))
            self._kept[kind][name] = tensor

    def of_kind(self, kind: str) -> dict[str, torch.Tensor]:
        """Everything of a kind, by parameter name."""
        return self._kept[kind]

    def state_dict(self) -> State:
        """On the host: a copy on the device would need the memory of all residuals once more."""
        kept: State = {kind: copies_on_host(kept) for kind, kept in self._kept.items()}
        return {"discards": self.keeps_copies, **kept}

    def load_state_dict(self, state: State) -> None:
        """From a state that holds what :meth:`state_dict` returned, perhaps among other things."""
        self.keeps_copies = state.get("discards", False)
        self._kept = {kind: dict(state[kind]) for kind in self._kept}
        self._changed = {}  # those units are not used any more
        self._before.clear()


def with_mean_residuals(states: Iterable[State]) -> State:
    """One state from those of all ranks, which differ in their residuals: their mean stays what it was."""
    merged: State = {}
    count = 0
    for count, state in enumerate(states, start=1):
        if count == 1:
            merged = state
            continue
        for name, error in state["error"].items():
            merged["error"][name] = merged["error"][name] + error
    merged["error"] = {name: error / count for name, error in merged["error"].items()}
    return merged

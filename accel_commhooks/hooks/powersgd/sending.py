"""How factors travel: beside the vectors of their unit, or in digits with those of other units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ...comm.pending import PendingResult
from ...upstream import foreach
from ..parcels import Parcel, parcels
from .units import Run, Unit

Side = Literal["p", "q"]
PARCELS = 4
"""So many travel one after the other, the first of them during backward; more would be more kernels than that gains."""


def in_parcels(sizes: Sequence[int]) -> list[Parcel]:
    """Factors of these sizes, in the model's order, as they travel in digits."""
    return parcels(sizes, math.ceil(sum(sizes) / PARCELS))


class Mean(Protocol):
    """The mean over ranks, in place; ``lost`` becomes what rounding took of this rank's values."""

    def __call__(self, tensor: torch.Tensor, lost: torch.Tensor | None = None) -> PendingResult: ...


class Sending(Protocol):
    """The way that factors take."""

    def send_with_vectors(self, unit: Unit, side: Side, *, is_last: bool) -> None:
        """A unit's first factor, its vectors and its flags. The factor of the side that ``is_last`` makes the approximation."""

    def send(self, unit: Unit) -> None:
        """A unit's second factor, Q."""

    def all_given(self) -> None:
        """All units have given what they send in this stage."""

    def wait(self, unit: Unit) -> None:
        """Until everything that this unit sent has been replaced by its mean."""

    def abandon(self) -> None:
        """Forget what is under way."""


class BesideVectors:
    """In the type of the wire, which may be the unit's own: then factor and vectors are one collective."""

    def __init__(self, mean: Mean, mean_in_full: Mean, *, narrows: bool):
        self._mean, self._mean_in_full, self._narrows = mean, mean_in_full, narrows

    def send_with_vectors(self, unit: Unit, side: Side, *, is_last: bool) -> None:
        factor = unit.factor(side)
        both = slice(min(factor.start, unit.small.start), max(factor.stop, unit.small.stop))
        parts = [(factor, self._mean), (unit.small, self._mean_in_full)] if self._narrows else [(both, self._mean)]
        unit.pending = [mean(unit.flat[part]) for part, mean in parts if part.stop > part.start]

    def send(self, unit: Unit) -> None:
        if unit.runs:
            unit.pending = [self._mean(unit.flat[unit.right])]

    def all_given(self) -> None:
        pass

    def wait(self, unit: Unit) -> None:
        unit.wait()

    def abandon(self) -> None:
        pass


@dataclass(eq=False)
class _Load:
    """A parcel of factors under way."""

    parcel: Parcel
    factors: list[torch.Tensor]
    """The units' own memory, where the means go."""
    values: torch.Tensor
    own: list[torch.Tensor]
    """Where this rank's part of the mean goes; empty for a factor that residuals do not depend on."""
    counted: torch.Tensor | None
    lost: torch.Tensor | None
    pending: PendingResult

    def arrive(self) -> None:
        self.pending.wait()
        foreach.copy(self.factors, [part.of(self.values) for part in self.parcel.parts])
        if self.counted is not None and self.lost is not None:
            self.counted.sub_(self.lost)
            foreach.copy(self.own, [part.of(self.counted) for part in self.parcel.parts])


class InDigits:
    """Each side's factors in parcels that depend on the model only (parcels.py).

    A residual is what is missing of this rank's own gradient in what was *counted* of it: its own factor as rounding left
    it. Reckoned with the mean of all ranks, residuals would hold the differences between ranks' gradients, for ever and ever
    more of them, and digits would be spent on those.
    """

    def __init__(self, mean: Mean, mean_in_full: Mean, order: Sequence[str]):
        self._mean, self._mean_in_full = mean, mean_in_full
        self._order = {name: index for index, name in enumerate(order)}
        self._parcels: dict[Side, list[tuple[list[str], Parcel]]] = {}
        self._given: dict[str, tuple[Run, int]] = {}
        self._side: Side = "p"
        self._is_last = False
        self._loads: dict[str, _Load] = {}
        """What is under way, by the matrix's name."""

    def send_with_vectors(self, unit: Unit, side: Side, *, is_last: bool) -> None:
        if unit.small.stop > unit.small.start:
            unit.pending = [self._mean_in_full(unit.flat[unit.small])]
        self._give(unit, side, is_last)

    def send(self, unit: Unit) -> None:
        self._give(unit, "q", True)

    def _give(self, unit: Unit, side: Side, is_last: bool) -> None:
        self._side, self._is_last = side, is_last
        for run in unit.runs:
            run.own = torch.empty_like(getattr(run, side)) if is_last and run.errors is not None else None
            self._given.update({matrix.name: (run, index) for index, matrix in enumerate(run.matrices)})
        for names, parcel in self._parcels.get(side, []):
            if names and names[0] in self._given and all(name in self._given for name in names):
                self._send(names, parcel)

    def all_given(self) -> None:
        if not self._given:
            return
        names = sorted(self._given, key=lambda name: self._order.get(name, 0))
        sizes = [getattr(run, self._side)[index].numel() for run, index in map(self._given.__getitem__, names)]
        made = in_parcels(sizes)
        self._parcels[self._side] = [([names[part.index] for part in parcel.parts], parcel) for parcel in made]
        for members, parcel in self._parcels[self._side]:
            self._send(members, parcel)

    def _send(self, names: list[str], parcel: Parcel) -> None:
        given = [self._given.pop(name) for name in names]
        factors = [getattr(run, self._side)[index].view(-1) for run, index in given]
        make = torch.zeros if parcel.is_padded else torch.empty
        values = make(parcel.numel, dtype=factors[0].dtype, device=factors[0].device)
        foreach.copy([part.of(values) for part in parcel.parts], factors)
        own = [run.own[index].view(-1) for run, index in given if run.own is not None]
        counted, lost = (values.clone(), torch.empty_like(values)) if own else (None, None)
        load = _Load(parcel, factors, values, own, counted, lost, self._mean(values, lost))
        self._loads.update(dict.fromkeys(names, load))

    def wait(self, unit: Unit) -> None:
        unit.wait()
        for run in unit.runs:
            for matrix in run.matrices:
                load = self._loads.get(matrix.name)
                if load is not None:
                    load.arrive()
                    self._loads = {name: each for name, each in self._loads.items() if each is not load}

    def abandon(self) -> None:
        self._given, self._loads = {}, {}

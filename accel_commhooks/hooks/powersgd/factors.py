"""The factors from which a step starts, and which of a step's factors are kept for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...upstream import foreach
from ...upstream.devices import to_device
from ..host import on_host
from .sending import Side
from .units import Kept, Matrix, Unit


def _kept(unit: Unit, side: Side) -> Kept:
    kept = unit.p_kept if side == "p" else unit.q_kept
    assert kept is not None
    return kept


def _cut(unit: Unit, side: Side, flat: torch.Tensor) -> list[torch.Tensor]:
    """A flat tensor like a unit's kept factors, as the factors of its runs."""
    shapes = [(run.p if side == "p" else run.q).shape for run in unit.runs]
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def kept_ones(units: Sequence[Unit], side: Side) -> list[torch.Tensor]:
    """Those of the last step, for each run; rows that it left at zero start at random."""
    kept = [_kept(unit, side) for unit in units]
    flat = foreach.sums([each.flat for each in kept], [each.spare for each in kept])
    return [start for unit, each in zip(units, flat, strict=True) for start in _cut(unit, side, each)]


def fresh_ones(units: Sequence[Unit], draw: Callable[[Matrix], torch.Tensor]) -> list[torch.Tensor]:
    """Random right factors, drawn on the host so that they are the same on all ranks, whatever their devices."""
    drawn = [draw(matrix).view(-1) for unit in units for run in unit.runs for matrix in run.matrices]
    if not drawn:
        return []
    flat = to_device(torch.cat(drawn), units[0].flat.device).to(units[0].flat.dtype)
    parts = flat.split([len(unit.q_kept.flat) for unit in units])
    return [start for unit, part in zip(units, parts, strict=True) for start in _cut(unit, "q", part)]


def keep(wave: Sequence[Unit], side: Side, fine: torch.Tensor, *, only_used: bool) -> None:
    """The factors of this side are those to start from next time, unless something was not finite.

    With ``only_used`` those of a parameter that no rank used stay, and so does its residual: DDP leaves it as it was.
    """
    if only_used:
        for unit in wave:
            used = (unit.flags > 0).split([len(run.matrices) for run in unit.runs])
            for run, of_run in zip(unit.runs, used, strict=True):
                chosen = of_run.view(-1, 1, 1)
                new, kept = (run.p, run.p_kept) if side == "p" else (run.q, run.q_kept)
                assert kept is not None
                torch.where(fine & chosen, new, kept, out=kept)
                if side == "p":  # the factor that did not travel, so that nothing is counted of this rank either
                    run.right = run.right * chosen
                else:
                    run.left = run.left * chosen
        return
    new_ones = [unit.flat[unit.left if side == "p" else unit.right] for unit in wave]
    old_ones = [_kept(unit, side).flat for unit in wave]
    if on_host(fine):
        if fine:
            foreach.copy(old_ones, new_ones)
        return
    merged = torch.where(fine, torch.cat(new_ones), torch.cat(old_ones))
    foreach.copy(old_ones, merged.split([len(old) for old in old_ones]))

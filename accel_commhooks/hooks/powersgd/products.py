"""The products of a step: gradient matrices with their factors, for the matrices of a unit.

On an accelerator a run of matrices is one call; on a CPU each matrix goes through the cache in blocks (lowrank.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...upstream import foreach
from . import lowrank
from .units import Unit


def project(unit: Unit, *, onto_p: bool, batched: bool, adds_errors: bool = False) -> None:
    """P = Q M^T, or Q = P M (row factors); with ``adds_errors``, M = gradient + residual first."""
    errors = unit.errors() if adds_errors else []
    if batched:
        foreach.add(unit.matrices() if errors else [], errors)
        for run in unit.runs:
            lowrank.project(run.view(unit.m), run.left, run.right, onto_p=onto_p)
        return
    for index, (matrix, p, q) in enumerate(_each(unit)):
        if errors:
            lowrank.add_and_project(matrix, errors[index], p, q, onto_p=onto_p)
        elif onto_p:
            torch.mm(p, matrix, out=q)
        else:
            torch.mm(q, matrix.t(), out=p)


def approximate(wave: list[Unit], fine: torch.Tensor, *, batched: bool) -> None:
    """M becomes P^T Q, and the residual M - P^T Q of what was counted; residuals stay what they were unless ``fine``."""
    if batched:
        longest = max((matrix.rows for unit in wave for run in unit.runs for matrix in run.matrices), default=0)
        rows = lowrank.rows_to_keep(longest, fine)
        for unit in wave:
            for run in unit.runs:
                lowrank.approximate_batch(run.view(unit.m), run.errors, (run.left, run.right), run.counted, rows)
        return
    keeps = bool(fine)
    for unit in wave:
        errors = unit.errors()
        counted = [pair for run in unit.runs for pair in zip(*run.counted, strict=True)]
        for index, (matrix, p, q) in enumerate(_each(unit)):
            if errors:
                lowrank.approximate(matrix, errors[index], (p, q), counted[index], keeps=keeps)
            else:
                torch.mm(p.t(), q, out=matrix)


def _each(unit: Unit) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(M, P, Q) of each matrix."""
    factors = ((p, q) for run in unit.runs for p, q in zip(run.left, run.right, strict=True))
    return ((matrix, p, q) for matrix, (p, q) in zip(unit.matrices(), factors, strict=True))

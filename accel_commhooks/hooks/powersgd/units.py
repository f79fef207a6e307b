"""Where PowerSGD's matrices, factors and residuals of one step are.

A :class:`Unit` is what is compressed together (the gradients of one bucket). Everything that it sends is in one flat buffer::

    [ P of all matrices | vectors | flags | Q of all matrices ]

so that P, vectors and flags travel in one collective, and so do vectors, flags and Q. Matrices of one shape that lie at even
distances in the gradient are a :class:`Run`: one strided view of the gradient shows all of them, without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...comm.pending import PendingResult

SPARE = 1e-35  # below what rounding leaves of any gradient that matters, above float32's smallest numbers


@dataclass(frozen=True)
class Matrix:
    """One matrix: its place in the unit's flat gradient, and the rank it is compressed to."""

    name: str
    offset: int
    rows: int
    columns: int
    rank: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.rank


@dataclass(eq=False)
class Run:
    """Matrices of one shape at even distances, and their factors: [b, r, n] and [b, r, m]."""

    matrices: list[Matrix]
    distance: int
    """Elements from one matrix to the next."""
    p: torch.Tensor
    """Where P is computed and sent from, in the unit's buffer."""
    q: torch.Tensor
    errors: torch.Tensor | None
    """The residuals, [b, n + 1, m]; row 0 is scratch space (see lowrank.rows_to_keep). None without error feedback."""
    q_kept: torch.Tensor
    """The right factor to start from, a part of the unit's."""
    p_kept: torch.Tensor | None
    """The left factor to start from, where both take turns."""
    basis: torch.Tensor | None = None
    """The orthonormal factor that this step starts from."""
    left: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The left factor of this step's approximation."""
    right: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    own: torch.Tensor | None = None
    """What was counted of this rank in the factor that made the approximation; None where that is not known."""

    @property
    def counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of what was counted of this rank's gradient: it has lost the rest."""
        if self.own is None:
            return self.left, self.right
        return (self.own, self.right) if self.left is self.p else (self.left, self.own)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """All matrices of the run, [b, n, m], in a flat gradient."""
        first = self.matrices[0]
        size = (len(self.matrices), first.rows, first.columns)
        return flat.as_strided(size, (self.distance, first.columns, 1), flat.storage_offset() + first.offset)


def _runs(matrices: list[Matrix]) -> list[tuple[list[Matrix], int]]:
    """(matrices, distance): as few runs as there can be, taking matrices in their order."""
    by_shape: dict[tuple[int, int, int], list[Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    runs: list[tuple[list[Matrix], int]] = []
    for same in by_shape.values():
        run, distance = same[:1], same[0].rows * same[0].columns
        for before, matrix in itertools.pairwise(same):
            gap = matrix.offset - before.offset
            if len(run) > 1 and gap != distance:
                runs.append((run, distance))
                run = []
            run.append(matrix)
            distance = gap
        runs.append((run, distance))
    return runs


@dataclass(eq=False)
class Kept:
    """Factors to start from, kept from step to step: one flat tensor for all matrices of a unit."""

    flat: torch.Tensor
    spare: torch.Tensor
    """Random and tiny. Added to a factor, it changes only rows that are zero: what the last gradient left at zero, its
    rank being too low, starts at random."""


@dataclass(eq=False)
class Unit:
    """The buffers of what is compressed together, and the state of this step."""

    numel: int
    runs: list[Run]
    vectors: list[tuple[int, int]]
    """(offset, length) of what travels uncompressed."""
    flat: torch.Tensor
    left: slice
    small: slice
    right: slice
    q_kept: Kept
    p_kept: Kept | None
    residuals: list[tuple[str, int, int]]
    """(parameter, offset, length) of the residuals that are remembered, where the gradient has them."""

    m: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    pending: list[PendingResult] = field(default_factory=list)
    started: bool = False
    deliver: Callable[[], None] = lambda: None

    @classmethod
    def allocate(
        cls,
        numel: int,
        matrices: list[Matrix],
        vectors: list[tuple[int, int]],
        residuals: list[tuple[str, int, int]],
        *,
        like: torch.Tensor,
        draw: Callable[[str, int, int], torch.Tensor],
        keeps_p: bool,
        keeps_error: bool,
    ) -> Unit:
        """Buffers of at least float32, on the device of the gradients; ``draw(key, r, n)`` gives random factors."""
        make: dict[str, Any] = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        runs = _runs(matrices)
        in_order = [matrix for run, _ in runs for matrix in run]
        size_p, size_q = (sum(x.rank * length(x) for x in in_order) for length in (_rows, _columns))
        size_vectors = sum(length for _, length in vectors)
        size_small = size_vectors + len(matrices)
        flat = torch.zeros(size_p + size_small + size_q, **make)
        random_q = _joined([draw(x.name, x.rank, x.columns) for x in in_order], make)
        random_p = _joined([draw(f"{x.name}/p", x.rank, x.rows) for x in in_order], make) if keeps_p else None
        q_kept = Kept(random_q, random_q * SPARE)
        p_kept = None if random_p is None else Kept(torch.zeros_like(random_p), random_p * SPARE)
        made, at_p, at_q = [], 0, size_p + size_small
        for run, distance in runs:
            b, (n, m, r) = len(run), run[0].shape
            place_p, place_q = slice(at_p, at_p + b * n * r), slice(at_q, at_q + b * m * r)
            kept = slice(place_q.start - size_p - size_small, place_q.stop - size_p - size_small)
            made.append(
                Run(
                    matrices=run,
                    distance=distance,
                    p=flat[place_p].view(b, r, n),
                    q=flat[place_q].view(b, r, m),
                    errors=torch.zeros(b, n + 1, m, **make) if keeps_error else None,
                    q_kept=q_kept.flat[kept].view(b, r, m),
                    p_kept=None if p_kept is None else p_kept.flat[place_p].view(b, r, n),
                )
            )
            at_p, at_q = place_p.stop, place_q.stop
        return cls(
            numel=numel,
            runs=made,
            vectors=vectors,
            flat=flat,
            left=slice(0, size_p),
            small=slice(size_p, size_p + size_small),
            right=slice(size_p + size_small, size_p + size_small + size_q),
            q_kept=q_kept,
            p_kept=p_kept,
            residuals=residuals,
        )

    def abandon(self) -> None:
        """Forget the step that was under way."""
        self.pending, self.started, self.m = [], False, self.flat

    def factor(self, side: str) -> slice:
        """Where the factors of a side are."""
        return self.left if side == "p" else self.right

    def wait(self) -> None:
        """Wait for the collectives of this unit, in the order in which they were issued."""
        for pending in self.pending:
            pending.wait()
        self.pending = []

    def travelling_vectors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What travels uncompressed, in the gradient and in the buffer that is sent."""
        sizes = [length for _, length in self.vectors]
        sent = self.flat[self.small.start : self.small.start + sum(sizes)].split(sizes) if sizes else []
        return [self.m[offset : offset + length] for offset, length in self.vectors], list(sent)

    @property
    def flags(self) -> torch.Tensor:
        """One for each matrix, in the order of :meth:`matrices`: above zero where some rank had a gradient."""
        return self.flat[self.small.stop - sum(len(run.matrices) for run in self.runs) : self.small.stop]

    def matrices(self) -> list[torch.Tensor]:
        """Each matrix in the gradient."""
        return [matrix.view(self.m) for run in self.runs for matrix in run.matrices]

    def errors(self) -> list[torch.Tensor]:
        """The residual of each matrix, without its scratch space; empty without error feedback."""
        return [error[1:] for run in self.runs if run.errors is not None for error in run.errors]

    def remembered(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(kind, name, tensor) of everything that outlives a step."""
        for run in self.runs:
            for index, matrix in enumerate(run.matrices):
                yield "q", matrix.name, run.q_kept[index]
                if run.p_kept is not None:
                    yield "p", matrix.name, run.p_kept[index]
                if run.errors is not None:
                    end = matrix.offset + matrix.rows * matrix.columns
                    for name, offset, length in self.residuals:
                        if matrix.offset <= offset < end:
                            start = offset - matrix.offset
                            yield "error", name, run.errors[index, 1:].view(-1)[start : start + length]


def _rows(matrix: Matrix) -> int:
    return matrix.rows


def _columns(matrix: Matrix) -> int:
    return matrix.columns


def _joined(factors: list[torch.Tensor], make: dict[str, Any]) -> torch.Tensor:
    return torch.cat([factor.view(-1) for factor in factors] or [torch.empty(0)]).to(**make)

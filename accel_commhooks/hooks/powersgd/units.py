"""Where PowerSGD's matrices, factors and residuals are kept in memory.

A :class:`Unit` is what is compressed together (the gradients of one bucket). Everything that it sends is in one flat buffer::

    [ P of all matrices | vectors | flags | Q of all matrices ]

so that P, vectors and flags travel in one collective, and so do vectors, flags and Q. Matrices of one shape stand side by
side and are orthogonalised in one call.

:class:`Memory` keeps what outlives a step, by parameter name. While a unit is in use the memory points into it; when DDP
rebuilds its buckets, new units are filled from the old ones by name.
"""

from __future__ import annotations

import weakref
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
class ShapeGroup:
    """Matrices of one shape, and their factors: [b, r, n] and [b, r, m]."""

    matrices: list[Matrix]
    p: torch.Tensor
    """The left factor of this step."""
    q: torch.Tensor
    """The right factor of this step."""
    flags: torch.Tensor
    """[b, 1, 1]: above zero where some rank had a gradient."""
    errors: list[torch.Tensor]
    """The residual of each matrix, [n + 1, m]; the extra row is scratch space (see lowrank.approximate). Empty if unused."""
    q_kept: torch.Tensor
    """The right factor to start from, kept from step to step."""
    p_kept: torch.Tensor | None
    """The left factor to start from, where both take turns."""
    q_spare: torch.Tensor
    """Random and tiny: adding it changes only rows that are zero."""
    p_spare: torch.Tensor | None

    def start_p(self) -> torch.Tensor:
        """See :meth:`start_q`."""
        assert self.p_kept is not None and self.p_spare is not None
        return self.p_kept + self.p_spare

    def start_q(self) -> torch.Tensor:
        """The factor to start from. Rows that the last gradient left at zero, its rank being too low, start at random."""
        return self.q_kept + self.q_spare


@dataclass(eq=False)
class Unit:
    """The buffers of what is compressed together, and the state of this step."""

    numel: int
    groups: list[ShapeGroup]
    vectors: list[tuple[int, int]]
    """(offset, length) of what travels uncompressed."""
    flat: torch.Tensor
    left: slice
    small: slice
    right: slice
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
        by_shape: dict[tuple[int, int, int], list[Matrix]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        size_p = sum(len(same) * n * r for (n, _, r), same in by_shape.items())
        size_q = sum(len(same) * m * r for (_, m, r), same in by_shape.items())
        size_vectors = sum(length for _, length in vectors)
        size_small = size_vectors + len(matrices)
        flat = torch.zeros(size_p + size_small + size_q, **make)
        groups, at_p, at_flag, at_q = [], 0, size_p + size_vectors, size_p + size_small
        for (n, m, r), same in by_shape.items():
            b = len(same)
            random_q = torch.stack([draw(matrix.name, r, m) for matrix in same]).to(**make)
            random_p = torch.stack([draw(f"{matrix.name}/p", r, n) for matrix in same]).to(**make) if keeps_p else None
            groups.append(
                ShapeGroup(
                    matrices=same,
                    p=flat[at_p : at_p + b * n * r].view(b, r, n),
                    q=flat[at_q : at_q + b * m * r].view(b, r, m),
                    flags=flat[at_flag : at_flag + b].view(b, 1, 1),
                    errors=[torch.zeros(n + 1, m, **make) for _ in same] if keeps_error else [],
                    q_kept=random_q,
                    p_kept=None if random_p is None else torch.zeros_like(random_p),
                    q_spare=random_q * SPARE,
                    p_spare=None if random_p is None else random_p * SPARE,
                )
            )
            at_p, at_flag, at_q = at_p + b * n * r, at_flag + b, at_q + b * m * r
        return cls(
            numel=numel,
            groups=groups,
            vectors=vectors,
            flat=flat,
            left=slice(0, size_p),
            small=slice(size_p, size_p + size_small),
            right=slice(size_p + size_small, size_p + size_small + size_q),
            residuals=residuals,
        )

    def abandon(self) -> None:
        """Forget the step that was under way."""
        self.pending, self.started, self.m = [], False, self.flat

    def wait(self) -> None:
        """Wait for the collectives of this unit, in the order in which they were issued."""
        for pending in self.pending:
            pending.wait()
        self.pending = []

    def pack_vectors(self) -> None:
        at = self.small.start
        for offset, length in self.vectors:
            self.flat[at : at + length].copy_(self.m[offset : offset + length])
            at += length

    def unpack_vectors(self) -> None:
        at = self.small.start
        for offset, length in self.vectors:
            self.m[offset : offset + length].copy_(self.flat[at : at + length])
            at += length

    def errors(self) -> list[torch.Tensor]:
        """All residuals of this unit."""
        return [error for group in self.groups for error in group.errors]

    def remembered(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(kind, name, tensor) of everything that outlives a step."""
        for group in self.groups:
            for index, matrix in enumerate(group.matrices):
                yield "q", matrix.name, group.q_kept[index]
                if group.p_kept is not None:
                    yield "p", matrix.name, group.p_kept[index]
                if group.errors:
                    end = matrix.offset + matrix.rows * matrix.columns
                    for name, offset, length in self.residuals:
                        if matrix.offset <= offset < end:
                            start = offset - matrix.offset
                            yield "error", name, group.errors[index].view(-1)[start : start + length]


class Memory:
    """What outlives a step: factors and residuals by parameter name.

    A backward changes residuals at once, but its gradients may be cleared without a step: a generator's loss goes through
    the discriminator, SAM looks ahead. Then residuals must be as they were before. A copy of them is kept from the first
    time on that gradients are discarded; scripts that never do so do not pay for it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {"q": {}, "p": {}, "error": {}}
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
            for copy, error in zip(self._before[unit], errors, strict=True):
                copy.copy_(error)

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

    def factors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is the same on all ranks: both factors to start from."""
        return {f"factor {kind}": self._kept[kind] for kind in ("q", "p")}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {kind: {name: t.detach().clone() for name, t in kept.items()} for kind, kept in self._kept.items()}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        self._kept = {kind: dict(kept) for kind, kept in state.items()}
        self._changed = {}  # those units are not used any more
        self._before.clear()

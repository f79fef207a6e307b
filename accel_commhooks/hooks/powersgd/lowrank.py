"""The low-rank mathematics of PowerSGD (Vogels et al., 2019, arXiv:1905.13727), as pure functions on batches.

Letters are the paper's: M is a gradient matrix [n, m], P and Q its factors. Factors are stored as rows, P as [r, n] and Q as
[r, m], so that M ~ P^T Q: a column in the paper is then contiguous, and products with M are up to twice as fast.

These products are limited by memory bandwidth, not by arithmetic. On an accelerator matrices of one shape are one kernel, and
nothing is read back to the host. On a CPU a few rows at a time go through all operations while they are in the cache; values
may be read there, because the CPU is the host.
"""

from __future__ import annotations

import math
import zlib

import torch

# Two blocks and what is made of them fit into a core's second cache; smaller ones cost more calls than they save.
_BLOCK_BYTES = 2**18


def _rows_at_once(m: torch.Tensor) -> int:
    return max(1, _BLOCK_BYTES // (m.shape[1] * m.element_size()))


# One matrix on a CPU.


def add_and_project(m: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, onto_p: bool) -> None:
    """M += residual; then Q = P M, or P = Q M^T."""
    count = _rows_at_once(m)
    blocks = zip(m.split(count), residual.split(count), p.split(count, dim=1), strict=True)
    for index, (m_rows, residual_rows, p_rows) in enumerate(blocks):
        m_rows.add_(residual_rows)
        if onto_p:
            q.addmm_(p_rows, m_rows, beta=1 if index else 0)
        else:
            torch.mm(q, m_rows.t(), out=p_rows)


Factors = tuple[torch.Tensor, torch.Tensor]
"""P and Q."""


def approximate(m: torch.Tensor, residual: torch.Tensor, result: Factors, counted: Factors, *, keeps: bool) -> None:
    """M becomes P^T Q of the result; if ``keeps``, the residual becomes M - P^T Q of what was counted."""
    (p, q), (own_p, own_q), count = result, counted, _rows_at_once(m)
    rows = (each.split(count) for each in (m, residual, p.t(), own_p.t()))
    for m_rows, residual_rows, p_rows, own_p_rows in zip(*rows, strict=True):
        if keeps:
            torch.addmm(m_rows, own_p_rows, own_q, alpha=-1, out=residual_rows)
        torch.mm(p_rows, q, out=m_rows)


# Batches, on any device.


def project(m: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, onto_p: bool) -> None:
    """Q = P M, or P = Q M^T."""
    if onto_p:
        torch.bmm(p, m, out=q)
    else:
        torch.bmm(q, m.mT, out=p)


def rows_to_keep(count: int, fine: torch.Tensor) -> torch.Tensor:
    """Where the rows of a new residual go: to rows 1, 2, ... of the old one if ``fine``, all to row 0 otherwise.

    Row 0 is scratch space: a rejected update is written there, so that the host never has to read ``fine``.
    """
    return torch.where(fine, torch.arange(1, count + 1, device=fine.device), 0)


def approximate_batch(
    m: torch.Tensor, residual: torch.Tensor | None, result: Factors, counted: Factors, rows: torch.Tensor
) -> None:
    """The same; the residual has row 0 as scratch space, and ``rows`` says where its rows go (see above)."""
    if residual is not None:
        own_p, own_q = counted
        m.baddbmm_(own_p.mT, own_q, alpha=-1)
        residual.index_copy_(1, rows[: m.shape[1]], m)
    p, q = result
    torch.bmm(p.mT, q, out=m)


def rank_for(rows: int, columns: int, rank: int, min_compression_rate: float) -> int:
    """The rank to compress an [rows, columns] matrix with, or 0 if that would not shrink it enough (torch's rule)."""
    rank = min(rows, columns, rank)
    shrinks = (rows + columns) * rank * min_compression_rate < rows * columns
    return rank if shrinks and min(rows, columns) > 1 else 0  # a vector is its own factor


def random_factor(rank: int, n: int, *, key: str, seed: int) -> torch.Tensor:
    """A random [rank, n] matrix that depends on nothing but its key and seed: the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(rank, n, generator=generator, dtype=torch.float32)


def square_side(numel: int) -> int:
    """The side of the smallest square matrix that holds so many elements."""
    return math.isqrt(numel - 1) + 1 if numel else 0

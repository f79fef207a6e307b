"""The low-rank mathematics of PowerSGD (Vogels et al., 2019, arXiv:1905.13727), as pure functions on batches.

Letters are the paper's: M is a gradient matrix [n, m], P and Q its factors. Factors are stored as rows, P as [r, n] and Q as
[r, m], so that M ~ P^T Q: a column in the paper is then contiguous, and products with M are up to twice as fast.

These products are limited by memory bandwidth, not by arithmetic. On an accelerator each is one kernel for a whole matrix,
and nothing is read back to the host. On a CPU a few rows at a time go through all operations while they are in the cache;
values may be read there, because the CPU is the host.
"""

from __future__ import annotations

import math
import zlib

import torch

from ..host import on_host

# Below this, 1 / x overflows in float32.
_TINY = 1e-37
# Two blocks and what is made of them fit into a core's second cache; smaller ones cost more calls than they save.
_BLOCK_BYTES = 2**18


def _rows_at_once(m: torch.Tensor) -> int:
    return max(1, _BLOCK_BYTES // (m.shape[1] * m.element_size())) if on_host(m) else len(m)


def add_and_project(m: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *, onto_p: bool) -> None:
    """M += residual; then Q = P M, or P = Q M^T."""
    count = _rows_at_once(m)
    blocks = zip(m.split(count), residual[:-1].split(count), p.split(count, dim=1), strict=True)
    for index, (m_rows, residual_rows, p_rows) in enumerate(blocks):
        m_rows.add_(residual_rows)
        if onto_p:
            q.addmm_(p_rows, m_rows, beta=1 if index else 0)
        else:
            torch.mm(q, m_rows.t(), out=p_rows)


def approximate(m: torch.Tensor, residual: torch.Tensor, p: torch.Tensor, q: torch.Tensor, fine: torch.Tensor) -> None:
    """M becomes P^T Q, and the residual becomes M - P^T Q; unless ``fine``, the residual stays as it was.

    The residual has one row more than M. The extra row is scratch space: on an accelerator a rejected update is written
    there, so that the host never has to read ``fine``.
    """
    columns = p.t()
    if not on_host(m):
        m.addmm_(columns, q, alpha=-1)
        residual.index_copy_(0, torch.where(fine, torch.arange(len(m), device=m.device), len(m)), m)
        torch.mm(columns, q, out=m)
        return
    count, keeps = _rows_at_once(m), bool(fine)
    for m_rows, residual_rows, p_rows in zip(
        m.split(count), residual[:-1].split(count), columns.split(count), strict=True
    ):
        if keeps:
            torch.addmm(m_rows, p_rows, q, alpha=-1, out=residual_rows)
        torch.mm(p_rows, q, out=m_rows)


def orthogonalize(factors: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """An orthonormal basis of the rows of each matrix of a batch [b, r, n].

    Whatever the rows are, the result is finite, and each of its rows has length one or zero. Rows are scaled by their
    largest entry first, so squares neither overflow nor underflow. A NaN stays visible. No value is read back to the host.
    ``epsilon`` is added to each norm, as in torch.
    """
    _, rank, n = factors.shape
    largest = factors.abs().amax(dim=2, keepdim=True).clamp_min(_TINY)
    rows = factors / largest
    if on_host(rows) and not epsilon and rank <= n:
        return householder(rows)
    return gram_schmidt(rows, epsilon / largest)


def householder(rows: torch.Tensor) -> torch.Tensor:
    """QR by LAPACK, ten times faster than Gram-Schmidt on a CPU. A linearly dependent row gets an arbitrary direction."""
    return torch.linalg.qr(rows.transpose(1, 2)).Q.transpose(1, 2)


def gram_schmidt(rows: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """In place, for all matrices at once, which needs few kernels. Linearly dependent rows become zero.

    Each row is projected twice, which is enough for orthogonality to machine precision (Giraud et al., 2005). It is
    dropped when less is left of it than rounding can have put there: this covers zero rows, repeated ones and r > n.
    """
    _, rank, n = rows.shape
    least = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(8 * torch.finfo(rows.dtype).eps * math.sqrt(n))
    for i in range(rank):
        row, done = rows[:, i : i + 1], rows[:, :i]
        if i > 0:
            for _ in range(2):
                row.baddbmm_(row @ done.transpose(1, 2), done, alpha=-1)
        norm = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        # What is at most noise becomes zero; a NaN is not, and stays visible.
        row.mul_(torch.where(norm <= least[:, i : i + 1], 0.0, (norm + epsilon[:, i : i + 1]).reciprocal()))
    return rows


def rank_for(rows: int, columns: int, rank: int, min_compression_rate: float) -> int:
    """The rank to compress an [rows, columns] matrix with, or 0 if that would not shrink it enough (torch's rule)."""
    rank = min(rows, columns, rank)
    return rank if (rows + columns) * rank * min_compression_rate < rows * columns else 0


def random_factor(rank: int, n: int, *, key: str, seed: int) -> torch.Tensor:
    """A random [rank, n] matrix that depends on nothing but its key and seed: the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(rank, n, generator=generator, dtype=torch.float32)


def square_side(numel: int) -> int:
    """The side of the smallest square matrix that holds so many elements."""
    return math.isqrt(numel - 1) + 1 if numel else 0

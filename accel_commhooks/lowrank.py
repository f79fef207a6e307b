"""The low-rank mathematics of PowerSGD (Vogels et al., 2019, arXiv:1905.13727), as pure functions on batches.

Letters are the paper's: M is a gradient matrix [n, m], P [n, r] and Q [m, r] its factors, M ~ P Q^T.
"""

from __future__ import annotations

import math
import zlib

import torch

# Below this, 1 / x overflows in float32.
_TINY = 1e-37


def orthogonalize(columns: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """An orthonormal basis of the columns of each matrix of a batch [b, n, r]; columns without a direction become zero.

    Gram-Schmidt, each column projected twice, which is enough for orthogonality to machine precision (Giraud et al.,
    2005). Columns are scaled by their largest entry first, so squares neither overflow nor underflow. A column is dropped
    when less is left of it than rounding can have put there: this covers zero columns, repeated ones and r > n. No value
    is ever read back to the host. ``epsilon`` is added to each norm, as in torch.
    """
    _, n, rank = columns.shape
    rows = columns.transpose(1, 2).contiguous()  # a column is then contiguous, which is several times faster
    largest = rows.abs().amax(dim=2, keepdim=True).clamp_min(_TINY)
    rows.div_(largest)
    least = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(8 * torch.finfo(rows.dtype).eps * math.sqrt(n))
    for i in range(rank):
        row, done = rows[:, i : i + 1], rows[:, :i]
        if i > 0:
            for _ in range(2):
                row.baddbmm_(row @ done.transpose(1, 2), done, alpha=-1)
        norm = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        divisor = norm + epsilon / largest[:, i : i + 1] if epsilon else norm
        # What is at most noise becomes zero; a NaN is not, and stays visible.
        row.mul_(torch.where(norm <= least[:, i : i + 1], 0.0, divisor.reciprocal()))
    return rows.transpose(1, 2)


def rank_for(rows: int, columns: int, rank: int, min_compression_rate: float) -> int:
    """The rank to compress an [rows, columns] matrix with, or 0 if that would not shrink it enough (torch's rule)."""
    rank = min(rows, columns, rank)
    return rank if (rows + columns) * rank * min_compression_rate < rows * columns else 0


def random_factor(rows: int, rank: int, *, key: str, seed: int, like: torch.Tensor) -> torch.Tensor:
    """A random [rows, rank] matrix that depends on nothing but its key and seed: the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(rows, rank, generator=generator, dtype=torch.float32).to(like)


def square_side(numel: int) -> int:
    """The side of the smallest square matrix that holds so many elements."""
    return math.isqrt(numel - 1) + 1 if numel else 0

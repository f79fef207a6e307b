"""Orthonormal bases of PowerSGD's factors, of all matrices of a model together.

On a CPU each factor is decomposed by LAPACK. On an accelerator that would be hundreds of small kernels, so there the work is
done on Gram matrices (CholeskyQR2; Yamamoto et al., 2015): they are r x r whatever the factors' lengths are, so all matrices
of a model share one batch, and the number of calls depends neither on the number of layers nor on the rank. Only the
products with the factors themselves are made once for each length.

Whatever the rows are, the result is finite, and each of its rows has length one or zero. A NaN stays visible. No value is
read back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..host import on_host

_TINY = 1e-37  # below this, 1 / x overflows in float32


def orthonormal_bases(factors: Sequence[torch.Tensor], epsilon: float = 0.0) -> list[torch.Tensor]:
    """An orthonormal basis of the rows of each matrix of each batch [b, r, n]. ``epsilon`` is added to norms, as in torch."""
    bases: list[torch.Tensor] = list(factors)
    for members in _alike(factors).values():
        first = factors[members[0]]
        if on_host(first) and not epsilon and first.shape[1] <= first.shape[2]:
            for index in members:
                bases[index] = householder(factors[index])
            continue
        by_length: dict[int, list[int]] = {}
        for index in members:
            by_length.setdefault(factors[index].shape[2], []).append(index)
        joined = [_joined([factors[index] for index in same]) for same in by_length.values()]
        for same, basis in zip(by_length.values(), cholesky_qr(joined, epsilon), strict=True):
            parts = basis.split([len(factors[index]) for index in same])
            for index, part in zip(same, parts, strict=True):
                bases[index] = part
    return bases


def _alike(factors: Sequence[torch.Tensor]) -> dict[tuple[int, torch.dtype], list[int]]:
    """Indices of the factors that can share Gram matrices: those of one rank and type."""
    found: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, factor in enumerate(factors):
        found.setdefault((factor.shape[1], factor.dtype), []).append(index)
    return found


def _joined(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def householder(factor: torch.Tensor) -> torch.Tensor:
    """QR by LAPACK. A linearly dependent row gets an arbitrary direction.

    Rows are scaled by their largest entry first, so that squares neither overflow nor underflow.
    """
    rows = factor / factor.abs().amax(dim=2, keepdim=True).clamp_min(_TINY)
    return torch.linalg.qr(rows.transpose(1, 2)).Q.transpose(1, 2).contiguous()


def cholesky_qr(batches: list[torch.Tensor], epsilon: float = 0.0) -> list[torch.Tensor]:
    """Bases for batches [b, r, n] of one rank and type and of any lengths. Linearly dependent rows become zero.

    Gram matrices square the condition number, so they are made in double precision where the device has it: what float32
    can tell apart, they can. A row is dropped when less is left of it than rounding can have put there. The second pass
    makes what is left orthogonal to rounding.
    """
    dtype, wide = batches[0].dtype, _wide_type(batches[0])
    if wide == dtype:  # no wider type in which squares could neither overflow nor underflow
        scales = [rows.abs().amax(dim=2, keepdim=True).clamp_min(_TINY) for rows in batches]
        rows = [row / scale for row, scale in zip(batches, scales, strict=True)]
        epsilons = torch.cat([epsilon / scale for scale in scales]).squeeze(2) if epsilon else None
    else:
        rows, epsilons = [row.to(wide) for row in batches], None
    gram = torch.cat([row @ row.mT for row in rows])
    rank = gram.shape[1]
    identity = torch.eye(rank, dtype=wide, device=gram.device)
    lengths = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(wide).tiny).sqrt()
    unit = gram / (lengths[:, :, None] * lengths[:, None])
    # The shift keeps the factorisation from breaking down where rows depend on each other; such rows are dropped.
    shift = 4 * rank * torch.finfo(wide).eps
    lower = torch.linalg.cholesky_ex(unit + shift * identity).L
    left = lower.diagonal(dim1=1, dim2=2)
    least = max(64 * torch.finfo(dtype).eps, 8 * math.sqrt(rank * torch.finfo(wide).eps))
    kept = (left > least).to(wide)
    transform = torch.linalg.solve_triangular(lower, identity, upper=False) * kept[:, :, None] / lengths[:, None]
    # What a factorisation makes of a NaN is up to its library.
    transform = transform + (gram.sum(dim=(1, 2)) * 0)[:, None, None]
    rows = _apply(transform, rows)
    gram = torch.cat([row @ row.mT for row in rows]) + torch.diag_embed(1 - kept)
    transform = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L, identity, upper=False)
    if epsilon:
        norm = left * lengths
        transform = transform * (norm / (norm + (epsilon if epsilons is None else epsilons)))[:, :, None]
    return [row.to(dtype) for row in _apply(transform, rows)]


def _apply(transforms: torch.Tensor, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = transforms.split([len(rows) for rows in batches])
    return [part @ rows for part, rows in zip(parts, batches, strict=True)]


def _wide_type(tensor: torch.Tensor) -> torch.dtype:
    """Double precision, or the tensor's own type on a device that does not have it."""
    kind = tensor.device.type
    if kind == "mps" or (kind == "xpu" and not torch.xpu.get_device_properties(tensor.device).has_fp64):
        return tensor.dtype
    return torch.float64

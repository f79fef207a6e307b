"""Operations on lists of tensors: on an accelerator one kernel serves many tensors.

These are ``torch._foreach_*``, with which torch's own optimizers work; there is no public name for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def copy(targets: Tensors, sources: Tensors) -> None:
    """Each target becomes its source; types may differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def zero(targets: Tensors) -> None:
    """Set each target to zero."""
    if targets:
        torch._foreach_zero_(list(targets))


def converted(tensors: Tensors, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Each tensor in its type; the tensor itself where it has that already."""
    made = [
        t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t, dtype in zip(tensors, dtypes, strict=True)
    ]
    changed = [(new, old) for new, old in zip(made, tensors, strict=True) if new is not old]
    copy([new for new, _ in changed], [old for _, old in changed])
    return made


def add(targets: Tensors, others: Tensors) -> None:
    """Add to each target, in place."""
    if targets:
        torch._foreach_add_(list(targets), list(others))


def subtract(targets: Tensors, others: Tensors) -> None:
    """Subtract from each target, in place."""
    if targets:
        torch._foreach_sub_(list(targets), list(others))


def sums(ones: Tensors, others: Tensors) -> Tensors:
    """New tensors."""
    return torch._foreach_add(list(ones), list(others)) if ones else []


# Called by its Python name with a tensor of one number, a foreach operation may read that number on the host.


def add_number(targets: Tensors, number: torch.Tensor) -> None:
    """Add one number, a tensor on the device, to each target in place."""
    if targets:
        torch.ops.aten._foreach_add_.Tensor(list(targets), number)


def multiply(targets: Tensors, number: torch.Tensor) -> None:
    """Multiply each target in place by one number, a tensor on the device."""
    if targets:
        torch.ops.aten._foreach_mul_.Tensor(list(targets), number)


def norms(tensors: Tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The Euclidean norm of each tensor, as one tensor."""
    return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))


def largest(tensors: Tensors) -> torch.Tensor:
    """The largest absolute value in each tensor, as one tensor; a NaN is larger than all. Empty tensors are not allowed."""
    if tensors[0].device.type == "cpu":  # where it takes a twentieth of a norm's time
        return torch.stack([torch.maximum(high, -low) for low, high in map(torch.aminmax, tensors)])
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))

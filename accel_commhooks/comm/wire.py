"""The types in which data travels: narrower than what is computed with, to send fewer bytes.

Only what a hook narrows on purpose is narrowed (gradients, factors, changes of weights). Norms, flags and weights that are
averaged always travel as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config.options import option
from .quantised import DIGIT_ERROR

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def wire_dtype_option(documentation: str, default: str | None = None) -> Any:
    """The ``wire_dtype`` option of a hook that can narrow what it sends; ``default`` may be a word of the hook's own."""
    return option(default, documentation, choices=tuple(dict.fromkeys([default, None, *_DTYPES])), aliases=("wrapper",))


def wire_dtype_named(name: str | None) -> torch.dtype | None:
    """The type that a ``wire_dtype`` option names; None to send data as it is."""
    return None if name is None else _DTYPES[name]


def is_quantised(dtype: torch.dtype | None) -> bool:
    """Whether numbers travel as digits with a scale for each block (quantised.py), and not in a type that can be added up."""
    return dtype is torch.int8


def itemsize_on_wire(itemsize: int, name: str | None) -> int:
    """Bytes that an element of ``itemsize`` bytes takes when it travels; narrowing never widens. Scales are left out."""
    return itemsize if name is None else min(itemsize, _DTYPES[name].itemsize)


def roundoff(dtype: torch.dtype) -> float:
    """The largest error of rounding to a type, relative to the number, or to the largest one of its block for digits."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else DIGIT_ERROR


def narrows(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor is smaller in the wire's type. A sparse one is left as it is."""
    if dtype is None or tensor.is_sparse or not tensor.is_floating_point():
        return False
    return tensor.element_size() > dtype.itemsize


def share_of_mean(tensor: torch.Tensor, ranks: int, dtype: torch.dtype | None) -> torch.Tensor:
    """What this rank sends towards a mean over so many ranks: divided in place, or into a copy in the wire's type."""
    if not narrows(tensor, dtype):
        return tensor.div_(ranks)
    return torch.div(tensor, ranks, out=torch.empty_like(tensor, dtype=dtype))


def narrow(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy in the wire's type, or the tensor itself where that would not make it smaller."""
    return tensor.to(dtype) if narrows(tensor, dtype) else tensor

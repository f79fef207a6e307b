"""Checksums of tensors: whole numbers, so that they do not depend on the hardware or the order in which it adds.

A change of any one bit changes the checksum. It is computed on the tensor's device, without a copy of the tensor, and nothing
is read back from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

COLUMNS = 1024
WORD = 8
"""Bytes that are added as one number: eight at a time is many times faster than four."""


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, all different, so that changes in different columns do not cancel each other."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(2**40, (COLUMNS,), generator=generator) * 2 + 1).to(device)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number, on the tensor's device, for all bits of a dense tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone()
    in_words = flat.numel() * flat.element_size() // WORD * WORD // flat.element_size()
    words, rest = flat[:in_words].view(torch.int64), flat[in_words:].view(torch.uint8)
    weights = _weights(flat.device)
    rows = words.numel() // COLUMNS
    columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
    tail = words[rows * COLUMNS :]
    return (
        (columns * weights).sum() + (tail * weights[: len(tail)]).sum() + (rest * weights[COLUMNS - len(rest) :]).sum()
    )


def checksum_of_all(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One number for some tensors in their order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total = total * 1_000_003 + checksum(tensor)
    return total

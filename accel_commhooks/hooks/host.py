"""Where a tensor's values may be read at no cost: on a CPU, which is the host itself.

A hook may take a faster path there. :func:`as_on_accelerator` makes it take the other one, so that what it does on an accelerator
can be watched on a machine that has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_pretending = False


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host has this tensor's values, so that reading one makes nobody wait."""
    return tensor.device.type == "cpu" and not _pretending


@contextlib.contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Within it hooks do on a CPU what they do on an accelerator."""
    global _pretending
    before, _pretending = _pretending, True
    try:
        yield
    finally:
        _pretending = before

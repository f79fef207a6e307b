"""Copies between a device and the host that do not make the host wait more often than it must."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is not waited for, into pinned memory: complete when the device has done what it was given so far."""
    if tensor.device.type in ("cpu", "meta"):
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def copies_on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host, for a checkpoint; the device is waited for once."""
    copies = {name: to_host(tensor) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values()}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()
    return copies


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

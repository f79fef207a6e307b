"""Devices: which is the current one, its streams and autocast, and copies that do not make the host wait needlessly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

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


def current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Within it the device is the current one of its kind."""
    if device is None or device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within it nothing is narrowed by autocast, as it would be in a backward under it."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def on_this_stream(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The function, to be called on whatever stream is then the current one, and run on that of now.

    Both streams see what it did: that of now because it ran there, the caller's because it waits for it.
    """
    if device.type in ("cpu", "meta"):
        return function
    module = torch.get_device_module(device)
    issued = module.current_stream(device)

    def run() -> None:
        asking = module.current_stream(device)
        if asking == issued:
            function()
            return
        with module.stream(issued):
            function()
        asking.wait_stream(issued)

    return run

"""Devices: which is the current one, its streams and autocast, and copies that do not make the host wait needlessly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

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


_side_streams: dict[torch.device, torch.Stream] = {}


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[torch.Event | None]:
    """Within it work is given to a stream of its own, behind all that the current stream has been given so far.

    Yields an event that comes when that work is done (:func:`wait_for`). What is allocated and freed within is reused within
    only, and so behind whatever the current stream was given before the next time.
    """
    if device.type in ("cpu", "meta"):
        yield None
        return
    module = torch.get_device_module(device)
    if device not in _side_streams:
        _side_streams[device] = module.Stream(device=device)
    side = _side_streams[device]
    side.wait_stream(module.current_stream(device))
    end = torch.Event(device=device)
    with module.stream(side):
        yield end
        end.record(side)


def wait_for(event: torch.Event, device: torch.device) -> None:
    """Make the current stream wait; the host goes on."""
    torch.get_device_module(device).current_stream(device).wait_event(event)

"""Methods of torch that are replaced for the whole process, to hear of calls that leave no other trace.

An unchanged script hands over neither its GradScalers nor the state dicts that it loads. The replacements do what the
methods did, then tell their listeners. Listeners are held weakly, so without one nothing is left but a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import seams
from .callbacks import WeakList


class GradScalerWatch:
    """Tells which GradScaler scaled the loss of the backward under way, and when ``scaler.step`` is called and returns.

    There may be several scalers, and a step that a scaler skips is seen nowhere else. Calls the listeners'
    ``before_scaler_step(optimizer)`` and ``after_scaler_step(optimizer)``.
    """

    def __init__(self) -> None:
        self._scaling: torch.amp.GradScaler | None = None
        self.listeners = WeakList()
        _replace(torch.amp.GradScaler, "scale", self._scale)
        _replace(torch.amp.GradScaler, "step", self._step)

    def _scale(self, original: Callable, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if scaler.is_enabled():
            for tensor in scaled if isinstance(scaled, (list, tuple)) else [scaled]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._backward_through, weakref.ref(scaler)))
        return scaled

    def _step(self, original: Callable, scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = list(self.listeners)
        for listener in listeners:
            listener.before_scaler_step(optimizer)
        result = original(scaler, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.after_scaler_step(optimizer)
        return result

    def _backward_through(self, scaler: weakref.ref[torch.amp.GradScaler], gradient: torch.Tensor) -> None:
        self._scaling = scaler()
        seams.at_very_end_of_backward(self.forget)

    def forget(self) -> None:
        """No backward is under way."""
        self._scaling = None

    @property
    def scaling(self) -> torch.amp.GradScaler | None:
        """The scaler whose scaled loss the backward under way started from, or None."""
        return self._scaling


class LoadWatch:
    """Tells its listeners when ``load_state_dict`` has replaced a module's weights: ``weights_loaded(module)``.

    Hooks on the modules themselves would be in every copy and pickle of them.
    """

    def __init__(self) -> None:
        self.listeners = WeakList()
        _replace(torch.nn.Module, "load_state_dict", self._load)

    def _load(self, original: Callable, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        for listener in self.listeners:
            listener.weights_loaded(module)
        return result


grad_scaler_watch = functools.cache(GradScalerWatch)
"""The watch of this process, started at the first call."""
load_watch = functools.cache(LoadWatch)
"""The watch of this process, started at the first call."""


def _replace(owner: type, name: str, replacement: Callable) -> None:
    """Make ``owner.name`` call ``replacement(original, self, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, instance, *args, **kwargs)

    setattr(owner, name, replaced)

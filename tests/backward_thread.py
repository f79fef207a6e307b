"""Backward on a thread of its own, as torch runs it for models on an accelerator.

The caller waits for it. What torch hands to such a thread is handed over here too: grad mode, autocast, dispatch modes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_inside = threading.local()


def install() -> None:
    """For this process, from now on; twice does no harm."""
    real = torch.autograd.backward
    if getattr(real, "on_a_thread", False):
        return
    thread = ThreadPoolExecutor(1, "backward")

    def backward(*args, **kwargs):
        if getattr(_inside, "value", False):  # of a backward inside a backward, as in reentrant checkpointing
            return real(*args, **kwargs)
        state = _state()

        def run():
            _inside.value = True
            try:
                with ExitStack() as stack:
                    for context in state:
                        stack.enter_context(context)
                    return real(*args, **kwargs)
            finally:
                _inside.value = False

        return thread.submit(run).result()

    backward.on_a_thread = True
    torch.autograd.backward = backward


def _state() -> list:
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return [
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.autocast("cpu", dtype=dtype, enabled=enabled),
        *_get_current_dispatch_mode_stack(),
    ]

"""torch.compile: hooks that it leaves alone, and how to tell that a model is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A forward hook that torch.compile leaves alone.

    Traced, it would break graphs at whatever cannot be compiled, and fail at process groups. As it is, DDP's own call is
    run as ever, and the model inside of it is compiled in one piece.
    """
    return torch.compiler.disable(hook)


class CompileWatch:
    """Whether a model is compiled: itself, a part of it, or whatever calls it."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.called_from_compiled = False

    def eager(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Like :func:`eager`; notes whether it is called from compiled code, which nothing else tells."""
        run = eager(hook)

        def noting(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                self.called_from_compiled = True
            return run(*args)

        return noting

    def is_compiled(self) -> bool:
        return self.called_from_compiled or has_compiled_part(self._model)


def has_compiled_part(root: torch.nn.Module) -> bool:
    """Whether torch.compile has been applied to a module or a part of it (it leaves no public mark), or torch.jit."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
        for module in root.modules()
    )


def without_compile(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile was given, from the one it made (``_orig_mod``)."""
    return getattr(module, "_orig_mod", module)


def name_without_compile(name: str) -> str:
    """A parameter's name as it is without torch.compile, which inserts ``_orig_mod.``."""
    return name.replace("_orig_mod.", "")

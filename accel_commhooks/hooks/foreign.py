"""Hooks that were not written for this package: ``torch:powerSGD_hook``, ``my_package.my_module:my_hook``.

A foreign hook is DDP's ``hook(state, bucket) -> Future``. It runs unchanged: its traffic is not counted and its state is
not checkpointed, because they are not accessible from outside. What the name points to may also be a :class:`CommHook` class.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..comm.process_group import GradBucket
from ..config.errors import ConfigError, described, nearest, shown
from ..config.options import HookOptions, option
from ..config.registry import resolves_paths
from .base import CommHook, HookContext

_TORCH_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_TORCH_MODULES = ("default_hooks", "powerSGD_hook", "post_localSGD_hook", "quantization_hooks")
# torch's hooks whose state is a class of its own; all others take the process group.
_TORCH_STATES = {
    "powerSGD_hook": ("powerSGD_hook", "PowerSGDState"),
    "batched_powerSGD_hook": ("powerSGD_hook", "PowerSGDState"),
    "post_localSGD_hook": ("post_localSGD_hook", "PostLocalSGDState"),
}


def split_path(path: str) -> tuple[str, str]:
    """(module, name in it) of ``package.module:function``."""
    module, _, attribute = path.partition(":")
    if not attribute or not all(module.split(".")) or not path.isprintable():
        raise ConfigError(f"a function is named 'package.module:function', but got {shown(path)}")
    return module, attribute


def _is_path(value: str) -> str | None:
    try:
        split_path(value)
    except ConfigError as error:
        return f"state: {error.text}"
    return None


def _are_keywords(value: dict) -> str | None:
    wrong = [key for key in value if not isinstance(key, str)]
    return f"the keys of state_options must be text, but got {shown(wrong[0])}" if wrong else None


@dataclass(kw_only=True)
class ForeignOptions(HookOptions):
    state: str | None = option(
        None,
        "'package.module:factory' called as factory(process_group, **state_options) for the hook's state.",
        check=_is_path,
    )
    state_options: dict = option(
        {}, "Keyword arguments for the state's factory; for torch's PowerSGD its options.", check=_are_keywords
    )

    def starting_by(self, step: int) -> dict[str, Any]:
        """torch's hooks call the options that delay them ``start_...``; they are in the state's options."""
        late = {
            name: step
            for name, value in self.state_options.items()
            if str(name).startswith("start_") and isinstance(value, int) and value > step
        }
        return {"state_options": {**self.state_options, **late}} if late else {}


class ForeignHook(CommHook):
    """Runs a DDP communication hook function unchanged."""

    Options = ForeignOptions
    counted = False
    replicas_agree = False
    plain_tensors_only = False
    allows_repeated_closures = True
    function: Callable[[Any, GradBucket], torch.futures.Future]
    state_factory: Callable[..., Any] | None = None

    def __init__(self, options: ForeignOptions, context: HookContext):
        super().__init__(options, context)
        factory = _resolve(options.state) if options.state is not None else type(self).state_factory
        group = self.comm.everyone.process_group
        self._state = factory(group, **options.state_options) if factory is not None else group

    def common(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}  # torch's post_localSGD_hook, for one, leaves replicas different

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return type(self).function(self._state, bucket)


@resolves_paths
@cache
def foreign_hook(path: str) -> type[CommHook]:
    """A hook class for ``torch:function``, ``module:function`` or ``module:CommHookSubclass``."""
    target, factory = _torch_hook(path) if path.startswith("torch:") else (_resolve(path), None)
    if inspect.isclass(target) and issubclass(target, CommHook):
        if not (inspect.isclass(target.Options) and issubclass(target.Options, HookOptions)):
            raise ConfigError(
                f"the Options of '{path}' must be a subclass of HookOptions, but got {shown(target.Options)}"
            )
        if "name" not in vars(target):
            target.name = path
        return target
    if not callable(target):
        raise ConfigError(f"'{path}' must name a function or a CommHook class, but it is a {type(target).__name__}")
    body = {"function": staticmethod(target), "state_factory": factory and staticmethod(factory), "name": path}
    return type("ForeignHook", (ForeignHook,), {**body, "__doc__": inspect.getdoc(target)})


def _torch_hook(path: str) -> tuple[Any, Any]:
    wanted = path.removeprefix("torch:")
    known: dict[str, Any] = {}
    for module_name in _TORCH_MODULES:
        module = importlib.import_module(f"{_TORCH_PACKAGE}.{module_name}")
        known.update({n: f for n, f in vars(module).items() if n.endswith("_hook") and inspect.isfunction(f)})
    if wanted not in known:
        raise ConfigError(
            f"torch has no communication hook {shown(wanted)}{nearest(wanted, known)}\n  it has: {', '.join(sorted(known))}"
        )
    factory = None
    if wanted in _TORCH_STATES:
        module_name, class_name = _TORCH_STATES[wanted]
        factory = getattr(importlib.import_module(f"{_TORCH_PACKAGE}.{module_name}"), class_name)
    return known[wanted], factory


def _resolve(path: str) -> Any:
    module_name, attribute = split_path(path)
    try:
        module = importlib.import_module(module_name)
        found = hasattr(module, attribute)
        target = getattr(module, attribute) if found else None
    except KeyboardInterrupt:
        raise
    except ImportError as error:
        raise ConfigError(
            f"'{path}' cannot be imported: {error}; the module must be importable from the working folder or installed"
        ) from None
    except BaseException as error:  # whatever the module raises, SystemExit too
        raise ConfigError(
            f"'{path}' cannot be imported: {described(error)}; importing {module_name} must not fail"
        ) from error
    if not found:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"the module '{module_name}' has no '{attribute}'{nearest(attribute, names)}")
    return target

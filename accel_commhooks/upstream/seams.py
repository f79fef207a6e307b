"""The only module that uses private names of torch, Accelerate and Transformers, where they offer no public way.

Each function says what it relies on and why; tests/test_seams.py fails when upstream changes it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .live_objects import live_objects


def current_backward() -> int:
    """A number for the backward under way on this thread, -1 outside of one (``_current_graph_task_id``).

    A backward inside a backward (reentrant checkpointing) has a number of its own.
    """
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run a function when the backward under way has accumulated its last gradient.

    Relies on the autograd engine's ``queue_callback``, which FSDP uses for the same purpose; the public hooks all run
    before the last gradient has been added up.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def at_very_end_of_backward(callback: Callable[[], None]) -> None:
    """Run a function after everything that is queued for the end of this backward, such as what DDP puts off until then.

    A callback that is queued by a callback comes after those that were there already.
    """
    at_end_of_backward(lambda: at_end_of_backward(callback))


def keep_stream_busy(cycles: int) -> None:
    """Let the current CUDA stream do nothing for some clock cycles (``torch.cuda._sleep``), as torch's own tests do."""
    torch.cuda._sleep(cycles)


def sparse_nbytes(tensor: torch.Tensor) -> int:
    """Size of a sparse tensor's indices and values (``_indices``, ``_values``: the public ones need a sorted copy)."""
    return tensor._indices().nbytes + tensor._values().nbytes


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes whenever a tensor is written to in place (``_version``, which autograd checks itself)."""
    return tensor._version


def settle_reducer(ddp: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Let DDP forget what it noted of parameters, with ``find_unused_parameters``. Every rank calls it.

    DDP notes which parameters get a gradient, and forgets them only when it reduces: kept from reducing, it would later take
    parameters for used that have no gradient, and fail. It also notes in a forward which parameters its backward will
    not reach, and holds the next backward to it, even if that belongs to a forward in which it was muted. So it is
    given a backward to reduce, by way of ``reducer.prepare_for_backward``, as its forward does. Gradients stay what they are.
    """
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    trainable = [p for p, _ in gradients if p.requires_grad]
    if not trainable:
        return
    for parameter, _ in gradients:  # a frozen one too: it may have been used before
        parameter.grad = torch.zeros_like(parameter)
    with torch.enable_grad():
        nothing = torch.stack([parameter.sum() * 0 for parameter in trainable]).sum()
    reducer: Any = ddp.reducer
    reducer.prepare_for_backward([nothing])
    nothing.backward()
    for parameter, gradient in gradients:
        parameter.grad = gradient


def rebuild_buckets(ddp: torch.nn.Module) -> None:
    """What DDP's forward does first after the first backward: ranks compare their order of gradients, with a broadcast.

    It is done once (``reducer._rebuild_buckets``). Done before DDP's forward, a rank that is lost by then can be named.
    """
    state: Any = ddp
    if not (state._use_python_reducer or state._delay_all_reduce_all_params) and state.reducer._rebuild_buckets():
        state._has_rebuilt_buckets = True


def postpone_static_graph(ddp: torch.nn.Module) -> Callable[[], None]:
    """For a forward whose backward DDP does not reduce; returns a function that ends this.

    With ``static_graph`` DDP learns the graph in its first backward, which it must reduce: its forward would make it do so
    even now (``_static_graph_delay_allreduce_enqueued``).
    """
    state: Any = ddp
    if not state.static_graph:
        return lambda: None
    before = state._static_graph_delay_allreduce_enqueued
    state._static_graph_delay_allreduce_enqueued = True

    def end() -> None:
        state._static_graph_delay_allreduce_enqueued = before

    return end


def is_joining(ddp: torch.nn.Module) -> bool:
    """Whether DDP is inside ``with ddp.join():`` (``_join_config``)."""
    config: Any = ddp._join_config
    return config.enable


def keep_copies_plain(ddp: torch.nn.Module, forward_hooks: Iterable[Any]) -> Callable[[], None]:
    """Make copies and pickles of a DDP model what they are without our hooks; returns a function that ends this.

    ``copy`` and ``pickle`` ask an object for ``__getstate__``, which may be an attribute of the instance. Ours takes DDP's
    own state and leaves out our forward hooks (``_forward_hooks``, ``_forward_pre_hooks``), the communication hook
    (``_comm_hooks``) and what was set on the instance itself.
    """
    ours = {handle.id for handle in forward_hooks}

    itself = weakref.ref(ddp)

    def getstate() -> dict[str, Any]:
        ddp: Any = itself()
        plain: Any = type(ddp).__getstate__
        state: dict[str, Any] = dict(plain(ddp))
        for name in ("__getstate__", "zero_grad"):
            state.pop(name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key not in ours)
        state["_comm_hooks"] = []
        return state

    ddp.__dict__["__getstate__"] = getstate

    def end() -> None:
        if (ddp := itself()) is not None:
            ddp.__dict__.pop("__getstate__", None)

    return end


def is_ignored_by_ddp(parameter: torch.nn.Parameter) -> bool:
    """Whether DDP was told to ignore this parameter (DDP marks it with ``_ddp_ignored``)."""
    return hasattr(parameter, "_ddp_ignored")


def after_import(module_name: str, action: Callable[[Any], None]) -> None:
    """Run ``action(module)`` once the module has been imported, at once if it has been already.

    A script that does not use transformers must not pay the seconds that importing it takes.
    """
    if module_name in sys.modules:
        action(sys.modules[module_name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            if fullname != module_name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module):
                    execute(module)
                    action(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


def add_default_trainer_callback(callback: type) -> None:
    """Give every Trainer made later a callback, first in line after the flow callback.

    Relies on ``transformers.trainer.DEFAULT_CALLBACKS``, the list each Trainer starts from.
    """

    def extend(module: Any) -> None:
        if callback not in module.DEFAULT_CALLBACKS:
            module.DEFAULT_CALLBACKS.append(callback)

    after_import("transformers.trainer", extend)


def order_callbacks(*, first: Any, last: Any) -> None:
    """Put ``first`` before the reporting callbacks of the Trainer that owns ``last``, and ``last`` behind all others.

    Figures must be in the logs before a reporter writes them, and whether an evaluation or a save follows is only known
    after every other callback was asked. Relies on ``CallbackHandler.callbacks``: callbacks are not told who owns them,
    and ``add_callback`` only appends. The list is replaced, because Trainer is iterating over it.
    """
    from transformers.trainer_callback import CallbackHandler

    for handler in live_objects(CallbackHandler):
        if last in handler.callbacks:
            others = [callback for callback in handler.callbacks if callback not in (first, last)]
            handler.callbacks = [*others[:1], first, *others[1:], last]


def masked_language_model_exists(config: Any) -> bool:
    """Whether Transformers has a masked language model for a config (``AutoModel..._model_mapping``)."""
    from transformers import AutoModelForMaskedLM

    return type(config) in AutoModelForMaskedLM._model_mapping


class _GuardedParameters(dict):
    """A module's parameters, each completed when it is read. Copies and pickles are plain dicts."""

    def __init__(self, parameters: dict, finish: Callable[[Any], None]):
        super().__init__(parameters)
        self._finish = finish

    def __getitem__(self, name):
        value = super().__getitem__(name)
        self._finish(value)
        return value

    def values(self):
        self._finish_all()
        return super().values()

    def items(self):
        self._finish_all()
        return super().items()

    def _finish_all(self) -> None:
        for value in super().values():
            self._finish(value)

    def __reduce__(self):
        return (dict, (dict(self.items()),))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded (FSDP's parameters; the class moved between versions)."""
    return type(tensor).__name__ in ("DTensor", "FlatParameter") or hasattr(tensor, "_local_tensor")


def guard_parameters(root: torch.nn.Module, finish: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call ``finish(parameter)`` whenever a parameter is read from a module; returns a function that ends this.

    Relies on ``Module._parameters``, through which ``module.weight``, ``parameters()`` and ``state_dict()`` all go. Forward
    hooks would not be enough: a module may use a child's weight without calling the child (MultiheadAttention does).
    """
    guarded = []
    for module in root.modules():
        if module._parameters:
            plain = module._parameters
            guard = _GuardedParameters(plain, lambda p: finish(p) if p is not None else None)
            module.__dict__["_parameters"] = guard
            guarded.append((module, plain, guard))

    def end() -> None:
        for module, plain, guard in guarded:
            if module.__dict__["_parameters"] is guard:
                if _identities(guard) != _identities(plain):
                    plain.clear()
                    plain.update(dict.items(guard))
                # The same dict as before: code that was compiled for it stays valid.
                module.__dict__["_parameters"] = plain

    return end


def _identities(parameters: dict) -> list[tuple[str, int]]:
    return [(name, id(parameter)) for name, parameter in dict.items(parameters)]

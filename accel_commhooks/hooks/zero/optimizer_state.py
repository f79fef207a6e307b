"""Optimizer state that is divided among the ranks and looks whole from outside.

Each rank keeps the state of the elements it owns. ``optimizer.state_dict()`` gives torch's ordinary, whole state once
:meth:`DividedState.gather` has collected it, and ``load_state_dict()`` takes such a state and keeps the owned
part. A checkpoint therefore does not depend on how many ranks wrote it, or whether they divided anything.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ...config.errors import CompatibilityError
from .shards import Shards

_divided_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[DividedState]] = weakref.WeakKeyDictionary()


class DividedState:
    """The states of a model's optimizers."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self._ownership, self._comm = shards.ownership, shards.ownership.comm
        self._handles: list[Any] = []
        self._loading: dict[str, Any] | None = None
        self._whole: dict[int, dict[int, dict[str, Any]]] = {}
        """By the optimizer's and the parameter's id; gathered, and not outdated by a step."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide what there is, and whatever is loaded later.

        An optimizer may outlive the model that it was divided for. What is divided already is divided in the same way.
        """
        owners = _divided_by.setdefault(optimizer, [])
        for former in [owner for owner in owners if owner.shards.overlaps(self.shards)]:
            former.release()
            owners.remove(former)
        owners.append(self)
        self._handles += [
            optimizer.register_state_dict_post_hook(self._state_dict_of),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._divide),
        ]
        self._divide(optimizer)

    def outdate(self) -> None:
        """Forget what was gathered: a step has changed it."""
        self._whole = {}

    def gather(self, optimizers: Iterable[torch.optim.Optimizer], *, keep: bool) -> None:
        """Put the whole states together where ``keep`` is True; collective, one tensor in flight at a time."""
        self._whole = {id(optimizer): self._gathered(optimizer, keep=keep) for optimizer in optimizers}

    def give_back(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Leave every rank with whole states; collective."""
        self.gather(optimizers, keep=True)
        whole = self._whole
        self.outdate()
        self.release()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if state := whole[id(optimizer)].get(id(parameter)):
                        kept = {key: _as_torch_keeps(key, value, parameter, group) for key, value in state.items()}
                        optimizer.state[parameter] = kept

    def release(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Dividing.

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    def _divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the owned part of a state that was loaded, or made before it was taken over."""
        self.outdate()
        as_saved = self._as_saved(optimizer)
        for parameter, state in optimizer.state.items():
            if parameter not in self.shards:
                continue
            start, stop = self._ownership.range(parameter)
            for key, value in state.items():
                if _is_whole(key, value, parameter):
                    # torch has cast it to the parameter's type, which may be narrower than what it steps with.
                    value = as_saved.get(id(parameter), state).get(key, value)
                    part = value.detach().reshape(-1)[start:stop]
                    dtype = self.shards.dtype(parameter) if value.is_floating_point() else value.dtype
                    state[key] = part.to(device=state[key].device, dtype=dtype, copy=True)

    def _as_saved(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """The state that is being loaded, by the parameter's id."""
        state_dict, self._loading = self._loading, None
        if state_dict is None:
            return {}
        keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return {
            id(parameter): state_dict["state"][key]
            for key, parameter in zip(keys, _parameters(optimizer), strict=True)
            if key in state_dict["state"]
        }

    # Putting together.

    def _gathered(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[int, dict[str, Any]]:
        """The state of every parameter with all its elements, on the CPU; empty where ``keep`` is False."""
        parameters = [p for p in _parameters(optimizer) if p in self.shards]
        # A rank that owns nothing of a small parameter has no state for it, so the ranks tell each other what there is.
        own = [self._split(optimizer, p) for p in parameters]
        everyone = self._comm.gather_objects(own)
        whole: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(parameters):
            kinds, counters = next((split[index] for split in everyone if split[index][0]), own[index])
            whole[id(parameter)] = dict(counters) if keep else {}
            for key, dtype in kinds.items():
                part = torch.empty(0, dtype=dtype, device=parameter.device)
                if key in own[index][0]:
                    part = optimizer.state[parameter][key]
                gathered = self._ownership.gather_one(part, parameter)
                if keep:
                    whole[id(parameter)][key] = gathered.cpu()
        return whole

    def _split(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[dict, dict]:
        """(types of what is divided, the rest: counters and the like) of one parameter's state on this rank."""
        start, stop = self._ownership.range(parameter)
        state = optimizer.state.get(parameter, {})
        divided = {
            k: v.dtype for k, v in state.items() if torch.is_tensor(v) and stop > start and v.shape == (stop - start,)
        }
        rest = {k: v.cpu() if torch.is_tensor(v) else v for k, v in state.items() if k not in divided}
        return dict(sorted(divided.items())), rest

    def _state_dict_of(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = _parameters(optimizer)
        if id(optimizer) not in self._whole:
            if not any(p in self.shards and p in optimizer.state for p in parameters):
                return state_dict
            raise CompatibilityError(
                "the optimizer's state is divided among the ranks, and state_dict() on one rank cannot gather it; call "
                "handle.prepare_save() on every rank first (accelerator.save_state and Trainer do so by themselves)"
            )
        whole = self._whole[id(optimizer)]
        state = dict(state_dict["state"])
        for index, parameter in enumerate(parameters):
            if whole.get(id(parameter)):
                state[index] = whole[id(parameter)]
            elif parameter in self.shards and index in state:
                state[index] = _Part(state[index])
        return {**state_dict, "state": dict(sorted(state.items()))}


class _Part(dict):
    """What a rank shows that did not keep the whole state: it can load it again, and nobody can save it by mistake."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CompatibilityError(
            "this rank has only its part of the optimizer's state, which is gathered on the first rank of each node; save it "
            "there (accelerator.save_state and Trainer do so), or detach the hook first to have it whole on every rank"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        return _Part({key: copy.deepcopy(value, memo) for key, value in self.items()})


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _as_torch_keeps(key: str, value: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A value of a whole state on the device and in the type that ``load_state_dict`` would give it."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        return value.to(parameter.device) if group.get("capturable") or group.get("fused") else value
    return value.to(device=parameter.device, dtype=parameter.dtype if value.is_floating_point() else value.dtype)


def _is_whole(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state tensor has an element for each of the parameter's, and is not a counter."""
    if not torch.is_tensor(value) or value.shape != parameter.shape:
        return False
    return value.numel() > 1 or (parameter.ndim == 0 and key != "step")

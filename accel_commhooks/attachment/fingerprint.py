"""What must be the same on every rank for a hook to work, and the words for a difference."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.roll_call import named
from ..config.options import HookOptions
from ..config.version import __version__

Fingerprint = dict[str, str]
"""What is compared, and its value on this rank, as text."""

_DDP_SETTINGS = ("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_bytes_cap")
SHOWN = 5
"""Differences that an error lists."""


def of_options(hook: str, options: HookOptions) -> Fingerprint:
    """The package's version, the hook, and all of its options with defaults filled in."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        "hook": hook,
        **{name: _as_text(value) for name, value in values.items()},
        "accel_commhooks": __version__,
    }


def of_model(ddp: DistributedDataParallel, parameters: Mapping[torch.Tensor, str]) -> Fingerprint:
    """The parameters, and those settings of DDP on which the order or the size of collectives depends."""
    settings = {name: str(getattr(ddp, name)) for name in _DDP_SETTINGS if hasattr(ddp, name)}
    described = {
        f"parameter {index}": f"{name} {list(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        for index, (p, name) in enumerate(parameters.items())
    }
    return {**settings, **described}


def of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> Fingerprint:
    """The optimizers' classes; empty if there is none yet."""
    kinds = sorted(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" for optimizer in optimizers)
    return {"optimizer": ", ".join(kinds)} if kinds else {}


def digest(fingerprint: Fingerprint) -> str:
    """A short text that is equal for equal fingerprints."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def differences(fingerprints: Mapping[int, Fingerprint]) -> list[str]:
    """One text for each item that is not the same on all ranks: ``rank 3 has period 4, all others 8``.

    An optimizer that a rank has not made yet is no difference, and the options of different hooks are not compared.
    """
    texts = []
    items = dict.fromkeys(item for fingerprint in fingerprints.values() for item in fingerprint)
    if len({fingerprint["hook"] for fingerprint in fingerprints.values()}) > 1:
        items = {"hook": None}
    for item in items:
        ranks_with: dict[str, list[int]] = {}
        for rank, fingerprint in fingerprints.items():
            if item in fingerprint or item != "optimizer":
                ranks_with.setdefault(fingerprint.get(item, "no such thing"), []).append(rank)
        if len(ranks_with) > 1:
            texts.append(_difference(item, ranks_with))
    return texts


def _difference(item: str, ranks_with: dict[str, list[int]]) -> str:
    """The most frequent value comes last."""
    *others, most = sorted(ranks_with, key=lambda value: (len(ranks_with[value]), -ranks_with[value][0]))
    first = ranks_with[others[0]]
    parts = [f"{named(first)} {'has' if len(first) == 1 else 'have'} {item} {others[0]}"]
    parts += [f"{named(ranks_with[value])} {value}" for value in others[1:SHOWN]]
    rest = ranks_with[most]
    parts.append(f"all others {most}" if len(rest) > 1 else f"{named(rest)} {most}")
    return ", ".join(parts)


def summary(texts: list[str]) -> str:
    """The first differences, and how many more there are."""
    more = f"; and {len(texts) - SHOWN} more differences" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def _as_text(value: Any) -> str:
    """A value without addresses in memory: an object is its class and its plain attributes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_as_text(k)}: {_as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_as_text, value)) + "]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    plain = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, (bool, int, float, str))}
    return f"{type(value).__module__}.{type(value).__qualname__} {plain}"

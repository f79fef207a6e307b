"""What torch knows of a process group and does not tell: its store, its timeout (private names, as in seams.py)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - asks, and calls no collective
from torch.distributed import distributed_c10d  # noqa: TID251 - as above


def store_of(process_group: dist.ProcessGroup) -> Any | None:
    """The store by which a group's ranks found each other (``_get_process_group_store``); None where there is no real one."""
    try:
        store = distributed_c10d._get_process_group_store(process_group)
    except KeyError:
        return None
    return None if store is None or "Fake" in type(_innermost(store)).__name__ else store


def _innermost(store: Any) -> Any:
    """What is inside of prefix stores."""
    while (inside := getattr(store, "underlying_store", None)) is not None and inside is not store:
        store = inside
    return store


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    """How long a group's collectives may take, as its user has set it (``_get_backend``, ``options._timeout``)."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            return options._timeout
    store = store_of(process_group)
    return store.timeout if store is not None else distributed_c10d.default_pg_timeout

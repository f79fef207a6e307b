"""What concerns the whole process: whether it is one of several, and how it leaves; and torch.distributed's types."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

__all__ = [
    "GradBucket",
    "ModelAverager",
    "ProcessGroup",
    "everyone",
    "is_initialized",
    "leave",
    "rank_in",
    "size_of",
    "world_size",
]


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Processes that train together; 1 outside a process group."""
    return dist.get_world_size() if is_initialized() else 1


def everyone() -> ProcessGroup:
    """The group of all processes."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def rank_in(process_group: ProcessGroup) -> int:
    """This process's rank in a group."""
    return dist.get_rank(process_group)


def size_of(process_group: ProcessGroup) -> int:
    """Ranks of a group."""
    return dist.get_world_size(process_group)


def leave() -> None:
    """Leave the process group together: the rank that holds the store must not end before the others."""
    dist.barrier()
    dist.destroy_process_group()

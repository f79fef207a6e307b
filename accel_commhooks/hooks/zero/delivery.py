"""Gradients on their way: from DDP's buckets to the ranks that own them, and back into ``p.grad``.

No rank steps with the part of ``p.grad`` that it does not own, so that part carries the rest of the norm: one element holds
the root of what the other ranks' parts add to the squared norm. ``clip_grad_norm_`` then returns the true norm and scales by
the same factor everywhere, and a non-finite gradient on one rank is seen by the GradScaler of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...comm.collectives import Communicator
from ...comm.process_group import GradBucket
from ...upstream import seams
from ...upstream.callbacks import weak_method
from ..base import new_future
from .sharding import Ownership

Parts = list[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, owned part of its mean gradient) pairs."""


class BucketInFlight:
    """A bucket on its way: packed and sent, received as this rank's parts, delivered to DDP."""

    def __init__(self, bucket: GradBucket, ownership: Ownership):
        self._buffer = bucket.buffer()
        self._ownership = ownership
        self.future = new_future(self._buffer.device)
        self._parameters = bucket.parameters()
        sizes = [p.numel() for p in self._parameters]
        self._receive = ownership.reduce(list(zip(self._parameters, self._buffer.split(sizes), strict=True)))
        self.parts: Parts = []
        self._rest: torch.Tensor | None = None

    def receive(self) -> Parts:
        """Wait for this rank's parts."""
        if not self.parts:
            self.parts = list(zip(self._parameters, self._receive(), strict=True))
        return self.parts

    def carry(self, rest: torch.Tensor) -> None:
        """Take what the other ranks' parts add to each parameter's norm."""
        self._rest = rest.to(self._buffer.dtype)

    def deliver(self) -> None:
        """Write owned parts and the rest of the norms into the bucket, and hand it to DDP."""
        self._buffer.zero_()
        offset, places, carried = 0, [], []
        for index, (parameter, part) in enumerate(self.parts):
            start, stop = self._ownership.range(parameter)
            self._buffer[offset + start : offset + stop].copy_(part)
            if stop - start < parameter.numel():
                places.append(offset + (stop if stop < parameter.numel() else start - 1))
                carried.append(index)
            offset += parameter.numel()
        if self._rest is not None and places:
            for place, index in zip(places, carried, strict=True):
                self._buffer[place : place + 1].copy_(self._rest[index : index + 1])
        self.future.set_result(self._buffer)


def share_norms(comm: Communicator, buckets: Sequence[BucketInFlight]) -> None:
    """One small all-reduce a step: every parameter's squared norm over all ranks."""
    # One number a parameter, so double precision costs nothing, and the reported norm is right to the last digit.
    parts = [part for bucket in buckets for _, part in bucket.parts]
    double = torch.float64 if parts[0].device.type != "mps" else torch.float32
    own = torch.stack([torch.linalg.vector_norm(part, dtype=double) for part in parts]).square()
    total = comm.all_reduce(own.clone(), mean=False).wait()
    rest = (total - own).clamp_min(0).sqrt()
    rest = torch.where(torch.isfinite(total), rest, total)
    offset = 0
    for bucket in buckets:
        bucket.carry(rest[offset : offset + len(bucket.parts)])
        offset += len(bucket.parts)


class DeliveredGradients:
    """The gradients that the last backward delivered, recognised by their versions.

    Needed twice: a later backward without zero_grad() adds to them, and a step that was taken inside backward must notice
    when they are changed afterwards.
    """

    def __init__(self, ownership: Ownership, names: dict[torch.Tensor, str]):
        self._ownership, self._names = ownership, names
        self._versions: dict[int, int] = {}
        self._watch: Any = None

    def record(self) -> None:
        """DDP has written the gradients of this backward."""
        self._versions = {id(p): seams.version_of(p.grad) for p in self._names if p.grad is not None}

    def changed(self) -> list[str]:
        """Names of the parameters whose gradients were written to since."""
        return [
            name
            for p, name in self._names.items()
            if p.grad is not None and id(p) in self._versions and self._versions[id(p)] != seams.version_of(p.grad)
        ]

    def watch_for_more(self) -> None:
        """Make room if the next backward, or one that has just begun, adds to gradients that are still there.

        It may be ``torch.autograd.grad``, which adds nothing, so nothing is prepared until a parameter's gradient arrives.
        """
        self.stop_watching()
        self._versions = {id(p): self._versions[id(p)] for p in self._still_there()}
        if self._versions:
            trained = [p for p in self._names if p.requires_grad]
            make_room = weak_method(self._make_room_for_more)
            self._watch = torch.autograd.graph.register_multi_grad_hook(trained, make_room, mode="any")

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _still_there(self) -> list[torch.Tensor]:
        return [p for p in self._names if p.grad is not None and id(p) in self._versions]

    def _make_room_for_more(self, first_gradient: torch.Tensor) -> None:
        """Scale the owned part by the number of ranks and clear the rest.

        The next mean divides by the number of ranks, and only the owner has the earlier gradient.
        """
        for parameter in self._still_there():
            start, stop = self._ownership.range(parameter)
            flat = parameter.grad.detach().view(-1)  # type: ignore[union-attr]
            flat[:start].zero_()
            flat[start:stop].mul_(self._ownership.comm.size)
            flat[stop:].zero_()
        self._versions = {}

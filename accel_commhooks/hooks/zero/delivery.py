"""Gradients on their way: from DDP's buckets to the ranks that own them, and back into ``p.grad``.

No rank steps with the part of ``p.grad`` that it does not own, so that part carries the rest of the norm: one element holds
the root of what the other ranks' parts add to the squared norm. ``clip_grad_norm_`` then returns the true norm and scales by
the same factor everywhere, and a non-finite gradient on one rank is seen by the GradScaler of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...comm.collectives import Communicator
from ...comm.process_group import GradBucket
from ...upstream import foreach, seams
from ...upstream.callbacks import weak_method
from ..base import new_future
from .sharding import Ownership

Parts = list[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, owned part of its mean gradient) pairs."""


class BucketInFlight:
    """A bucket on its way: packed and sent, received as this rank's parts, delivered to DDP."""

    def __init__(self, bucket: GradBucket, ownership: Ownership):
        self.buffer = bucket.buffer()
        self._ownership = ownership
        self.future = new_future(self.buffer.device)
        self._parameters = bucket.parameters()
        sizes = [p.numel() for p in self._parameters]
        self._receive = ownership.reduce(list(zip(self._parameters, self.buffer.split(sizes), strict=True)))
        self.parts: Parts = []
        self._rest: torch.Tensor | None = None

    def receive(self) -> Parts:
        """Wait for this rank's parts."""
        if not self.parts:
            self.parts = list(zip(self._parameters, self._receive(), strict=True))
        return self.parts

    def carry(self, rest: torch.Tensor) -> None:
        """Take what the other ranks' parts add to each parameter's norm, in the bucket's type."""
        self._rest = rest

    def places(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(place in the bucket, what goes there): owned parts and the rest of the norms; zero everywhere else."""
        offset = 0
        for index, (parameter, part) in enumerate(self.parts):
            start, stop = self._ownership.range(parameter)
            if len(part):
                yield self.buffer[offset + start : offset + stop], part
            if self._rest is not None and stop - start < parameter.numel():
                place = offset + (stop if stop < parameter.numel() else start - 1)
                yield self.buffer[place : place + 1], self._rest[index : index + 1]
            offset += parameter.numel()


def deliver(buckets: Sequence[BucketInFlight]) -> None:
    """Write everything into the buckets, and hand them to DDP."""
    foreach.zero([bucket.buffer for bucket in buckets])
    pairs = [pair for bucket in buckets for pair in bucket.places()]
    foreach.copy([place for place, _ in pairs], [part for _, part in pairs])
    for bucket in buckets:
        bucket.future.set_result(bucket.buffer)


def share_norms(comm: Communicator, buckets: Sequence[BucketInFlight]) -> None:
    """One small all-reduce a step: every parameter's squared norm over all ranks."""
    # One number a parameter, so double precision costs nothing, and the reported norm is right to the last digit.
    parts = [part for bucket in buckets for _, part in bucket.parts]
    double = torch.float64 if parts[0].device.type != "mps" else torch.float32
    own = foreach.norms(parts, double).square()
    total = comm.all_reduce(own.clone(), mean=False).wait()
    rest = (total - own).clamp_min(0).sqrt()
    rest = torch.where(torch.isfinite(total), rest, total)
    by_type = {dtype: rest.to(dtype) for dtype in {bucket.buffer.dtype for bucket in buckets}}
    offset = 0
    for bucket in buckets:
        bucket.carry(by_type[bucket.buffer.dtype][offset : offset + len(bucket.parts)])
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

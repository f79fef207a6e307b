"""Averaging in place, with bounded memory: tensors travel in slices, and the mean is written back where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...comm.collectives import Communicator
from ...comm.pending import PendingResult
from ...comm.survivors import Group

BUCKET_BYTES = 25 * 2**20


def slice_bytes(bucket_bytes: int = BUCKET_BYTES) -> int:
    """Size of one slice: a quarter of a bucket. One slice travels while the next is filled, and the backend copies both."""
    return bucket_bytes // 4


@dataclass(frozen=True)
class Piece:
    """A run of elements of the ``index``-th tensor."""

    index: int
    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return flat_view(tensor)[self.start : self.start + self.length]


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of its memory, whatever its strides (channels_last)."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def slices(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[Piece]]:
    """Pieces of at most ``limit`` bytes in all, of one type and device; large tensors are cut."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    for (dtype, _), same in by_kind.items():
        room = capacity = max(1, limit // dtype.itemsize)
        pieces: list[Piece] = []
        for index in same:
            start = 0
            while start < tensors[index].numel():
                length = min(room, tensors[index].numel() - start)
                pieces.append(Piece(index, start, length))
                start, room = start + length, room - length
                if room == 0:
                    yield pieces
                    pieces, room = [], capacity
        if pieces:
            yield pieces


class Exchange:
    """A mean over ranks, slice by slice: ``read(piece)`` returns what to send, ``write(piece, mean)`` stores the result."""

    def __init__(
        self,
        mean: Callable[[torch.Tensor], PendingResult],
        tensors: Sequence[torch.Tensor],
        read: Callable[[Piece], torch.Tensor],
        write: Callable[[Piece, torch.Tensor], object],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """``mean(flat)`` starts averaging a flat tensor in place."""
        self._mean, self._read, self._write = mean, read, write
        self._slices = slices(tensors, slice_bytes(bucket_bytes))
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._sent = 0
        self._under_way: list[tuple[list[Piece], torch.Tensor, PendingResult]] = []
        self._spare: list[torch.Tensor] = []

    def run(self) -> None:
        """Send and receive, with at most two slices in memory."""
        for pieces in self._slices:
            if len(self._under_way) > 1:
                self._receive()
            self._send(pieces)
            for *_, pending in self._under_way[:-1]:
                pending.go_on()
        self.finish()

    def advance(self, fraction: float) -> None:
        """Send until a fraction of all bytes is on its way; :meth:`finish` may come much later.

        What was sent by the call before must have arrived: a backend counts a collective's timeout from when it was issued.
        """
        before = len(self._under_way)
        while self._sent < fraction * self._total and (pieces := next(self._slices, None)) is not None:
            self._send(pieces)
        for *_, pending in self._under_way[:before]:
            pending.go_on()

    def finish(self) -> None:
        """Send what has not been sent, and receive everything."""
        for pieces in self._slices:
            self._send(pieces)
        while self._under_way:
            self._receive()

    def drop(self) -> None:
        """Wait for what is under way, and do not write it."""
        for *_, pending in self._under_way:
            pending.wait()
        self._under_way = []

    def _send(self, pieces: list[Piece]) -> None:
        parts = [self._read(piece) for piece in pieces]
        numel = sum(piece.length for piece in pieces)
        fitting = [spare for spare in self._spare if spare.dtype == parts[0].dtype and spare.numel() == numel]
        self._spare = []
        flat = torch.cat(parts, out=fitting[0]) if fitting else torch.cat(parts)
        self._sent += flat.nbytes
        self._under_way.append((pieces, flat, self._mean(flat)))

    def _receive(self) -> None:
        pieces, flat, pending = self._under_way.pop(0)
        pending.wait()
        offset = 0
        for piece in pieces:
            self._write(piece, flat[offset : offset + piece.length])
            offset += piece.length
        self._spare.append(flat)


def average_in_place(
    comm: Communicator,
    tensors: Sequence[torch.Tensor],
    *,
    group: Group | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    observe: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
) -> None:
    """Every tensor becomes its mean over the group; ``observe(own, mean)`` sees each piece before it is overwritten.

    Tensors that are not dense go through a copy of their own.
    """
    scattered = [(index, tensor) for index, tensor in enumerate(tensors) if not is_dense(tensor)]
    flat = list(tensors)
    for index, tensor in scattered:
        flat[index] = tensor.detach().contiguous()

    def write(piece: Piece, mean: torch.Tensor) -> None:
        own = piece.of(flat[piece.index])
        if observe is not None:
            observe(own, mean)
        own.copy_(mean)

    def mean(slice_: torch.Tensor) -> PendingResult:
        return comm.all_reduce(slice_, group=group)

    Exchange(mean, flat, lambda piece: piece.of(flat[piece.index]), write, bucket_bytes=bucket_bytes).run()
    for index, tensor in scattered:
        tensor.detach().copy_(flat[index])

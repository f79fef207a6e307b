"""Averaging in place: bounded memory, no re-pointed storage, torch's averager interface and schedules.

torch's averagers copy the whole model into one flat tensor and leave every parameter as a view of it, and they skip
parameters whose ``.grad`` is None. These go through the tensors in slices of bounded size, write the mean back where it
came from, and ask only for ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from ...comm.collectives import Communicator, Group, Pending
from ...config.errors import ConfigError

BUCKET_BYTES = 25 * 2**20


def slice_bytes(bucket_bytes: int = BUCKET_BYTES) -> int:
    """What travels at once: a quarter. While one slice travels the next is filled, and the backend needs as much again."""
    return bucket_bytes // 4


@dataclass(frozen=True)
class Piece:
    """A run of elements of the ``index``-th tensor."""

    index: int
    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().view(-1)[self.start : self.start + self.length]


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
    """A mean over a group, slice by slice: ``read(piece)`` gives what is sent, ``write(piece, mean)`` takes what comes."""

    def __init__(
        self,
        comm: Communicator,
        tensors: Sequence[torch.Tensor],
        read: Callable[[Piece], torch.Tensor],
        write: Callable[[Piece, torch.Tensor], object],
        *,
        group: Group | None = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._comm, self._group, self._wire_dtype = comm, group, wire_dtype
        self._read, self._write = read, write
        self._slices = slices(tensors, slice_bytes(bucket_bytes))
        self._under_way: list[tuple[list[Piece], Pending]] = []
        self._spare: list[torch.Tensor] = []

    def run(self) -> None:
        """Send and receive, with at most two slices in memory."""
        for pieces in self._slices:
            if len(self._under_way) > 1:
                self._receive()
            self._send(pieces)
        self.finish()

    def start(self) -> None:
        """Send everything; :meth:`finish` may come much later."""
        for pieces in self._slices:
            self._send(pieces)

    def finish(self) -> None:
        """Receive what is under way."""
        while self._under_way:
            self._receive()

    def _send(self, pieces: list[Piece]) -> None:
        parts = [self._read(piece) for piece in pieces]
        numel = sum(piece.length for piece in pieces)
        fitting = [spare for spare in self._spare if spare.dtype == parts[0].dtype and spare.numel() == numel]
        self._spare = []
        flat = torch.cat(parts, out=fitting[0]) if fitting else torch.cat(parts)
        pending = self._comm.all_reduce(flat, group=self._group, wire_dtype=self._wire_dtype)
        self._under_way.append((pieces, pending))

    def _receive(self) -> None:
        pieces, pending = self._under_way.pop(0)
        flat = pending.wait()
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

    Tensors that are not contiguous go through a copy of their own.
    """
    scattered = [(index, tensor) for index, tensor in enumerate(tensors) if not tensor.is_contiguous()]
    flat = list(tensors)
    for index, tensor in scattered:
        flat[index] = tensor.detach().contiguous()

    def write(piece: Piece, mean: torch.Tensor) -> None:
        own = piece.of(flat[piece.index])
        if observe is not None:
            observe(own, mean)
        own.copy_(mean)

    Exchange(comm, flat, lambda piece: piece.of(flat[piece.index]), write, group=group, bucket_bytes=bucket_bytes).run()
    for index, tensor in scattered:
        tensor.detach().copy_(flat[index])


def parameters_of(params: Iterable) -> list[torch.Tensor]:
    """Trainable parameters from what torch's averagers accept: parameters, or an optimizer's parameter groups."""
    found: list[torch.Tensor] = []
    for item in params:
        found.extend(item["params"] if isinstance(item, dict) else [item])
    return [parameter for parameter in found if parameter.requires_grad]


class Schedule:
    """When to average, and among whom."""

    def group_at(self, step: int) -> Group | None:
        """The group to average over after the ``step``-th step (from 0), or None."""
        raise NotImplementedError


class PeriodicSchedule(Schedule):
    """torch's PeriodicModelAverager: every ``period`` steps from ``warmup_steps`` on, among everyone."""

    def __init__(self, comm: Communicator, period: int, warmup_steps: int):
        self._comm, self._period, self._warmup = comm, period, warmup_steps

    def group_at(self, step: int) -> Group | None:
        due = step >= self._warmup and (step - self._warmup) % self._period == 0
        return self._comm.everyone if due else None


class HierarchicalSchedule(Schedule):
    """torch's HierarchicalModelAverager: of the periods that divide the step, the longest decides the group."""

    def __init__(self, comm: Communicator, period_group_size: dict[int, int], warmup_steps: int):
        self._warmup = warmup_steps
        periods, sizes = list(period_group_size), list(period_group_size.values())
        rule = "period_group_size must map rising periods to rising group sizes"
        if not periods or periods != sorted(set(periods)) or sizes != sorted(set(sizes)) or periods[0] < 1:
            raise ConfigError(f"{rule}, for example {{2: 4, 16: 32}}, but got {period_group_size}")
        if sizes[-1] != comm.size or any(comm.size % size for size in sizes):
            raise ConfigError(
                f"{rule} that divide the number of ranks, the last one being all of them, but got {period_group_size} "
                f"on {comm.size} ranks"
            )
        self._groups = {
            period: comm.everyone
            if size == comm.size
            else comm.subgroup([range(first, first + size) for first in range(0, comm.size, size)])
            for period, size in period_group_size.items()
        }

    def group_at(self, step: int) -> Group | None:
        if step < self._warmup:
            return None
        return next((group for period, group in reversed(self._groups.items()) if step % period == 0), None)


class PeriodicModelAverager(ModelAverager):
    """torch's PeriodicModelAverager, in place. For hand-written loops: ``average_parameters`` after each step."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None):
        super().__init__(process_group)
        if period < 1 or warmup_steps < 0:
            raise ConfigError(
                f"period must be at least 1 and warmup_steps at least 0, but got {period} and {warmup_steps}"
            )
        self.comm = Communicator(process_group)
        self._schedule: Schedule = PeriodicSchedule(self.comm, period, warmup_steps)

    def average_parameters(self, params: Iterable) -> None:
        """Average what requires gradients, if this step is one to average after; then count the step."""
        group = self._schedule.group_at(self.step)
        if group is not None:
            average_in_place(self.comm, parameters_of(params), group=group)
        self.step += 1


class HierarchicalModelAverager(PeriodicModelAverager):
    """torch's HierarchicalModelAverager, in place."""

    def __init__(
        self,
        period_group_size_dict: dict[int, int],
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(1, warmup_steps, process_group)
        self._schedule = HierarchicalSchedule(self.comm, period_group_size_dict, warmup_steps)

"""The one place that calls torch.distributed.

A :class:`Communicator` issues collectives in program order from the calling thread, never from a callback, so the order
is the same on every rank; counts every byte this rank sends, within a node and between nodes apart; and chooses what
each backend does best:

- Gloo's reduce-scatter sends as much as an all-reduce, so there an all-to-all and a local sum are used;
- sums of bf16 and fp16 run on Gloo and NCCL alike; data is divided before it is narrowed, so a sum cannot overflow
  where the mean would not.

The byte counts follow the algorithms these backends use for large messages: rings for all-reduce, reduce-scatter and
all-gather (each rank sends to its right neighbour only), direct sends for all-to-all, a binomial tree for broadcast.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .topology import Topology, host_key

PIECE_BYTES = 2**18
EXIT_SECONDS = 0.25
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, None: None}


@dataclass
class Traffic:
    """What one rank has sent, by ``(collective, scope)``; scope is 'within' a node or 'between' nodes."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    """Seconds the host stood in wait(). On an accelerator waiting happens on a stream and costs the host nothing."""

    def scope(self, scope: str) -> int:
        return sum(count for (_, where), count in self.sent.items() if where == scope)


@dataclass(frozen=True)
class Group:
    """Some ranks of a communicator. ``process_group`` is None for a group of one, which never communicates."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def right(self) -> int:
        return self.ranks[(self.index + 1) % self.size]


class Pending:
    """A collective under way. Keeps its tensors alive; ``wait()`` returns the result and may be called again."""

    def __init__(
        self,
        result: torch.Tensor,
        works: Sequence[dist.Work],
        traffic: Traffic,
        finish: Callable[[], object] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ):
        self._result, self._works, self._traffic, self._finish, self._keep = result, works, traffic, finish, keep

    def wait(self) -> torch.Tensor:
        if self._works:
            start = time.perf_counter()
            for work in self._works:
                work.wait()
            self._traffic.waited += time.perf_counter() - start
            self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._keep = ()
        return self._result


class Communicator:
    """Counted, ordered collectives over one process group. ``wire_dtype`` narrows every floating-point sum."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ):
        process_group = process_group if process_group is not None else dist.group.WORLD
        assert process_group is not None
        self._process_group = process_group
        self.wire_dtype = wire_dtype
        self.traffic = Traffic()
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.backend = dist.get_backend(process_group)
        self.topology = self._find_topology(ranks_per_node)
        self.everyone = Group(tuple(range(self.size)), self.rank, process_group)
        self._subgroups: list[dist.ProcessGroup] = []
        if self.backend == "gloo":
            atexit.unregister(_let_gloo_finish)  # once is enough
            atexit.register(_let_gloo_finish)

    def _find_topology(self, ranks_per_node: int | None) -> Topology:
        if ranks_per_node is not None:
            return Topology.even(self.size, ranks_per_node)
        return Topology.from_keys(self.gather_objects(host_key()))

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's group of a partition of the ranks. Every rank calls it, with the same partition."""
        mine: Group | None = None
        subset = self.size < dist.get_world_size()
        for ranks in partition:
            handle = None
            if len(ranks) > 1:
                members = [dist.get_global_rank(self._process_group, rank) for rank in ranks]
                handle = dist.new_group(members, backend=self.backend, use_local_synchronization=subset)
            if self.rank in ranks:
                mine = Group(tuple(ranks), list(ranks).index(self.rank), handle)
                if handle is not None:
                    self._subgroups.append(handle)
        if mine is None:
            mine = Group((self.rank,), 0, None)
        return mine

    def close(self) -> None:
        """Give up the groups made by :meth:`subgroup`."""
        while self._subgroups:
            dist.destroy_process_group(self._subgroups.pop())

    # Collectives. `group=None` is everyone; a group of one costs nothing and sends nothing.

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        mean: bool = True,
        group: Group | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Pending:
        """Sum or mean over the group, in place."""
        group = group or self.everyone
        if group.size == 1:
            return Pending(tensor, (), self.traffic)
        if mean:
            tensor.div_(group.size)
        buffer = self._narrow(tensor, wire_dtype)
        self._count("all_reduce", group, 2 * (group.size - 1) * _nbytes(buffer) / group.size)
        work = dist.all_reduce(buffer, group=group.process_group, async_op=True)
        finish = None if buffer is tensor else lambda: tensor.copy_(buffer)
        return Pending(tensor, [work], self.traffic, finish, keep=(buffer,))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        chunks: torch.Tensor,
        *,
        mean: bool = True,
        group: Group | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Pending:
        """``out`` becomes this rank's row of the sum (or mean) of everyone's ``chunks``, of shape [size, n]."""
        group = group or self.everyone
        if group.size == 1:
            return Pending(out.copy_(chunks.view_as(out)), (), self.traffic)
        if mean:
            chunks.div_(group.size)
        buffer = self._narrow(chunks, wire_dtype)
        if self.backend == "gloo":
            return self._reduce_scatter_directly(out, buffer.view(group.size, -1), group)
        self._count("reduce_scatter", group, (group.size - 1) * _nbytes(buffer) / group.size)
        target = out if buffer.dtype == out.dtype else torch.empty_like(out, dtype=buffer.dtype)
        work = dist.reduce_scatter_tensor(target, buffer, group=group.process_group, async_op=True)
        finish_copy = None if target is out else lambda: out.copy_(target)
        return Pending(out, [work], self.traffic, finish_copy, keep=(buffer, target))

    def all_gather(self, out: torch.Tensor, chunk: torch.Tensor, *, group: Group | None = None) -> Pending:
        """``out`` becomes everyone's ``chunk``, one after the other."""
        group = group or self.everyone
        if group.size == 1:
            return Pending(out.copy_(chunk.view_as(out)), (), self.traffic)
        self._count("all_gather", group, (group.size - 1) * _nbytes(chunk))
        if self.backend == "gloo":
            return self._all_gather_in_pieces(out, chunk.view(-1), group)
        work = _all_gather(out, chunk, group=group.process_group, async_op=True)
        return Pending(out, [work], self.traffic, keep=(chunk,))

    # Gloo moves a large message in one direction at a time; many small ones under way at once use both directions of a
    # link. On a shaped 200 Mbit/s link 14.7 MB each way take 0.80 s in pieces of 4 MB, 0.65 s in pieces of half a megabyte
    # and 0.63 s in pieces of a quarter, against 0.59 s at line rate; smaller ones gain nothing there and cost on a fast link.

    def _reduce_scatter_directly(self, out: torch.Tensor, rows: torch.Tensor, group: Group) -> Pending:
        """An all-to-all and a local sum: half of what Gloo's own reduce-scatter sends."""
        self._count_direct("reduce_scatter", group, _nbytes(rows) // group.size)
        sent, received = torch.empty_like(rows).view(-1), torch.empty_like(rows).view(-1)
        pieces, works = [], []
        for start, piece in _pieces(rows):
            place = slice(start * group.size, start * group.size + piece.numel())
            sent[place].view_as(piece).copy_(piece)
            works.append(dist.all_to_all_single(received[place], sent[place], group=group.process_group, async_op=True))
            pieces.append((start, received[place].view_as(piece)))

        def finish() -> None:
            for start, piece in pieces:
                torch.sum(piece, 0, dtype=out.dtype, out=out.view(-1)[start : start + piece.shape[1]])

        return Pending(out, works, self.traffic, finish, keep=(sent, received))

    def _all_gather_in_pieces(self, out: torch.Tensor, chunk: torch.Tensor, group: Group) -> Pending:
        rows, received = out.view(group.size, -1), torch.empty_like(out).view(-1)
        pieces, works = [], []
        for start, target in _pieces(rows):
            place = slice(start * group.size, start * group.size + target.numel())
            own = chunk[start : start + target.shape[1]]
            works.append(_all_gather(received[place], own, group=group.process_group, async_op=True))
            pieces.append((target, received[place].view_as(target)))

        def finish() -> None:
            for target, piece in pieces:
                target.copy_(piece)

        return Pending(out, works, self.traffic, finish, keep=(chunk, received))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, group: Group | None = None) -> Pending:
        """``tensor`` becomes that of the group's ``source``-th rank."""
        group = group or self.everyone
        if group.size == 1:
            return Pending(tensor, (), self.traffic)
        position = (group.index - source) % group.size
        for child in _binomial_children(position, group.size):
            self._count_to("broadcast", group.ranks[(child + source) % group.size], _nbytes(tensor))
        self.traffic.calls["broadcast"] += 1
        global_source = dist.get_global_rank(self._process_group, group.ranks[source])
        work = dist.broadcast(tensor, global_source, group=group.process_group, async_op=True)
        return Pending(tensor, [work], self.traffic)

    def reduce_to_owners(
        self, flat: torch.Tensor, sizes: Sequence[int], *, mean: bool = True, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        """The sum (or mean) of everyone's ``flat``, of which each rank gets its part: ``sizes[r]`` elements for rank r."""
        own = flat.new_empty(sizes[self.rank])
        if self.size == 1:
            return Pending(own.copy_(flat), (), self.traffic)
        if mean:
            flat.div_(self.size)
        buffer = self._narrow(flat, wire_dtype)
        received = buffer.new_empty(self.size * own.numel())
        self.traffic.calls["reduce_to_owners"] += 1
        for other, size in enumerate(sizes):
            if other != self.rank:
                self._count_to("reduce_to_owners", other, size * buffer.element_size())
        splits = [own.numel()] * self.size
        work = dist.all_to_all_single(received, buffer, splits, list(sizes), group=self._process_group, async_op=True)

        def finish() -> None:
            own.copy_(received.view(self.size, -1).sum(0, dtype=own.dtype))

        return Pending(own, [work], self.traffic, finish, keep=(buffer, received))

    def agree(self, fine: bool) -> bool:
        """Whether every rank says yes. A host synchronisation: for setup and checkpoints, never for a step."""
        return all(self.gather_objects(fine))

    def gather_objects(self, own: Any) -> list[Any]:
        """Everyone's small Python object, by rank. For setup and checkpoints, never for a step."""
        gathered: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, own, group=self._process_group)
        return gathered

    # Counting.

    def plain_all_reduce_bytes(self, nbytes: int) -> dict[str, float]:
        """What this rank would send, by scope, if ``nbytes`` were all-reduced over everyone as DDP does."""
        counts = {"within": 0.0, "between": 0.0}
        if self.size > 1:
            counts[self._scope(self.everyone.right)] = 2 * (self.size - 1) * nbytes / self.size
        return counts

    def _scope(self, other: int) -> str:
        return "within" if self.topology.same_node(self.rank, other) else "between"

    def _count_to(self, kind: str, other: int, nbytes: float) -> None:
        self.traffic.sent[kind, self._scope(other)] += round(nbytes)

    def _count(self, kind: str, group: Group, nbytes: float) -> None:
        self.traffic.calls[kind] += 1
        self._count_to(kind, group.right, nbytes)

    def _count_direct(self, kind: str, group: Group, nbytes_each: int) -> None:
        self.traffic.calls[kind] += 1
        for rank in group.ranks:
            if rank != self.rank:
                self._count_to(kind, rank, nbytes_each)

    def _narrow(self, tensor: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.Tensor:
        """A copy in the wire's type, or the tensor itself where that would not make it smaller."""
        wire_dtype = wire_dtype or self.wire_dtype
        if wire_dtype is None or not tensor.is_floating_point() or tensor.element_size() <= wire_dtype.itemsize:
            return tensor
        return tensor.to(wire_dtype)


def _let_gloo_finish() -> None:
    """Leave the interpreter to Gloo's threads for a moment, at the end of the script.

    A thread that has completed a collective, which is when wait() returns, still has its tensors to give back, and needs
    the interpreter for that. If the script is over by then, as after the averaging at the end of training, the process
    aborts with "terminate called without an active exception", and the launcher reports a failed run.
    """
    time.sleep(EXIT_SECONDS)


def _pieces(rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, [W, c] view) of pieces whose rows have at most PIECE_BYTES."""
    length = max(1, PIECE_BYTES // rows.element_size())
    for start in range(0, rows.shape[1], length):
        yield start, rows[:, start : start + length]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _binomial_children(position: int, size: int) -> list[int]:
    """Whom the ``position``-th rank sends to in a binomial tree that starts at position 0."""
    children, bit = [], 1
    while bit < size:
        if position < bit and position + bit < size:
            children.append(position + bit)
        bit *= 2
    return children


# Renamed in torch 2.13; the old name warns there and the new one is missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

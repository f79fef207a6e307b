"""Collectives: the only code that calls torch.distributed, but for what concerns a whole process (process_group.py).

A :class:`Communicator` issues collectives in program order from the calling thread, never from a callback, so the order
is the same on every rank. It counts every byte that this rank sends (traffic.py), and chooses what each backend does best:

- Gloo's reduce-scatter sends as much as an all-reduce, so there an all-to-all and a local sum are used; a group may have a
  backend for each kind of device (``cpu:gloo,cuda:nccl``), so it is the tensor that decides;
- sums of bf16 and fp16 run on Gloo and NCCL alike; data is divided before it is narrowed, so a sum cannot overflow
  where the mean would not.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..upstream import groups, seams
from ..upstream.devices import current
from . import pieces
from .backends import Backends
from .chains import Chain, Chains, Steps
from .pending import PendingCollective
from .survivors import Group, introduce, lost_ranks_named
from .topology import Topology, host_key
from .traffic import Traffic
from .wire import narrow, share_of_mean

EXIT_SECONDS = 0.25


class Communicator:
    """Counted, ordered collectives over one process group."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        hosts: Sequence[str] | None = None,
        device: torch.device | None = None,
    ):
        """``hosts`` are the ranks' host keys, where they have been told already; ``device`` is the model's."""
        process_group = process_group if process_group is not None else dist.group.WORLD
        assert process_group is not None
        self._process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.backends = Backends.of(process_group)
        self._device = device
        self.everyone = Group(tuple(range(self.size)), self.rank, process_group, process_group)
        self.topology = self._find_topology(ranks_per_node, hosts)
        self.traffic = Traffic(self.rank, self.topology)
        self._subgroups: list[dist.ProcessGroup] = []
        self._chains = Chains()
        introduce(process_group)
        if "gloo" in self.backends.by_device.values():
            atexit.unregister(_let_gloo_finish)  # once is enough
            atexit.register(_let_gloo_finish)

    def _find_topology(self, ranks_per_node: int | None, hosts: Sequence[str] | None) -> Topology:
        if ranks_per_node is not None:
            return Topology.even(self.size, ranks_per_node)
        return Topology.from_keys(hosts if hosts is not None else self.gather_objects(host_key()))

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's group of a partition of the ranks. Every rank calls it, with the same partition."""
        mine: Group | None = None
        subset = self.size < dist.get_world_size()
        for ranks in partition:
            handle = None
            if len(ranks) > 1:
                members = [dist.get_global_rank(self._process_group, rank) for rank in ranks]
                # Without a timeout torch takes its own default, and not that of the user's group.
                with lost_ranks_named(self.everyone):  # its members meet
                    handle = dist.new_group(
                        members,
                        timeout=groups.timeout_of(self._process_group),
                        backend=self.backends.name,
                        use_local_synchronization=subset,
                    )
            if self.rank in ranks:
                mine = Group(tuple(ranks), list(ranks).index(self.rank), handle, self._process_group)
                if handle is not None:
                    self._subgroups.append(handle)
        if mine is None:
            mine = Group((self.rank,), 0, None, self._process_group)
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
    ) -> PendingCollective:
        """Sum or mean over the group, in place, in a type that can be added up; digits travel by means.py."""
        group = group or self.everyone
        if group.size == 1:
            return PendingCollective(tensor, (), group, self.traffic)
        buffer = share_of_mean(tensor, group.size, wire_dtype) if mean else narrow(tensor, wire_dtype)
        if buffer.is_sparse:  # backends gather everyone's indices and values, and add them up
            self.traffic.count_all_gather(group.ranks, seams.sparse_nbytes(buffer))
        else:
            self.traffic.count_all_reduce(group.ranks, buffer.nbytes)
        with lost_ranks_named(group):
            work = dist.all_reduce(buffer, group=group.process_group, async_op=True)
        finish = None if buffer is tensor else lambda: tensor.copy_(buffer)
        return PendingCollective(tensor, [work], group, self.traffic, finish, keep=(buffer,))

    def chain(self, steps: Steps, tensor: torch.Tensor, *, patient: bool = False) -> Chain:
        """Begin collectives that follow from one another, and whose result is in ``tensor`` (chains.py)."""
        return self._chains.begin(steps, tensor, patient=patient)

    def forget_chains(self) -> None:
        """A backward has failed, so nobody waits for its chains."""
        self._chains.forget()

    def go_on(self) -> None:
        """Chains go one collective further. Called before each bucket, on all ranks alike."""
        self._chains.go_on()

    def maximum(self, tensor: torch.Tensor) -> PendingCollective:
        """The largest value on any rank, in place."""
        group = self.everyone
        if self.size == 1:
            return PendingCollective(tensor, (), group, self.traffic)
        self.traffic.count_all_reduce(group.ranks, tensor.nbytes)
        with lost_ranks_named(group):
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._process_group, async_op=True)
        return PendingCollective(tensor, [work], group, self.traffic)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        chunks: torch.Tensor,
        *,
        mean: bool = True,
        group: Group | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> PendingCollective:
        """``out`` becomes this rank's row of the sum (or mean) of everyone's ``chunks``, of shape [size, n]."""
        group = group or self.everyone
        if group.size == 1:
            return PendingCollective(out.copy_(chunks.view_as(out)), (), group, self.traffic)
        buffer = share_of_mean(chunks, group.size, wire_dtype) if mean else narrow(chunks, wire_dtype)
        if self.backends.of_tensor(buffer) == "gloo":
            return self._reduce_scatter_directly(out, buffer.view(group.size, -1), group)
        self.traffic.count_reduce_scatter(group.ranks, buffer.nbytes)
        target = out if buffer.dtype == out.dtype else torch.empty_like(out, dtype=buffer.dtype)
        with lost_ranks_named(group):
            work = pieces.reduce_scatter_single(target, buffer, group=group.process_group, async_op=True)
        finish_copy = None if target is out else lambda: out.copy_(target)
        return PendingCollective(out, [work], group, self.traffic, finish_copy, keep=(buffer, target))

    def _reduce_scatter_directly(self, out: torch.Tensor, rows: torch.Tensor, group: Group) -> PendingCollective:
        """An all-to-all and a local sum: half of what Gloo's own reduce-scatter sends."""
        self.traffic.count_direct("reduce_scatter", dict.fromkeys(group.ranks, rows.nbytes // group.size))
        under_way = pieces.exchange(rows, group)

        def finish() -> None:
            for start, piece in under_way.received:
                torch.sum(piece, 0, dtype=out.dtype, out=out.view(-1)[start : start + piece.shape[1]])

        return PendingCollective(out, under_way.works, group, self.traffic, finish, keep=under_way.keep)

    def all_to_all(self, rows: torch.Tensor, *, group: Group) -> PendingCollective:
        """Each rank of the group gets its row of everyone's ``rows``; the result is these, by rank."""
        received = torch.empty_like(rows)
        self.traffic.count_direct("all_to_all", dict.fromkeys(group.ranks, rows.nbytes // group.size))
        if self.backends.of_tensor(rows) == "gloo":
            under_way = pieces.exchange(rows, group)
            finish = partial(under_way.write, received)
            return PendingCollective(received, under_way.works, group, self.traffic, finish, keep=under_way.keep)
        with lost_ranks_named(group):
            work = dist.all_to_all_single(received, rows, group=group.process_group, async_op=True)
        return PendingCollective(received, [work], group, self.traffic, keep=(rows,))

    def all_gather(self, out: torch.Tensor, chunk: torch.Tensor, *, group: Group | None = None) -> PendingCollective:
        """``out`` becomes everyone's ``chunk``, one after the other."""
        group = group or self.everyone
        if group.size == 1:
            return PendingCollective(out.copy_(chunk.view_as(out)), (), group, self.traffic)
        self.traffic.count_all_gather(group.ranks, chunk.nbytes)
        if self.backends.of_tensor(chunk) == "gloo":
            rows = out.view(group.size, -1)
            under_way = pieces.gather(rows, chunk.view(-1), group)
            finish = partial(under_way.write, rows)
            return PendingCollective(out, under_way.works, group, self.traffic, finish, keep=under_way.keep)
        with lost_ranks_named(group):
            work = pieces.all_gather_single(out, chunk, group=group.process_group, async_op=True)
        return PendingCollective(out, [work], group, self.traffic, keep=(chunk,))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, group: Group | None = None) -> PendingCollective:
        """``tensor`` becomes that of the group's ``source``-th rank."""
        group = group or self.everyone
        if group.size == 1:
            return PendingCollective(tensor, (), group, self.traffic)
        self.traffic.count_broadcast(group.ranks, source, tensor.nbytes)
        global_source = dist.get_global_rank(self._process_group, group.ranks[source])
        with lost_ranks_named(group):
            work = dist.broadcast(tensor, global_source, group=group.process_group, async_op=True)
        return PendingCollective(tensor, [work], group, self.traffic)

    def reduce_to_owners(
        self, flat: torch.Tensor, sizes: Sequence[int], *, wire_dtype: torch.dtype | None = None
    ) -> PendingCollective:
        """The mean of everyone's ``flat``, of which each rank gets its part: ``sizes[r]`` elements for rank r.

        ``flat`` may be overwritten, and the result may be a part of it.
        """
        if self.size == 1:
            return PendingCollective(flat, (), self.everyone, self.traffic)
        buffer = share_of_mean(flat, self.size, wire_dtype)
        nbytes_to = {other: size * buffer.element_size() for other, size in enumerate(sizes)}
        self.traffic.count_direct("reduce_to_owners", nbytes_to)
        if self.backends.of_tensor(flat) == "gloo":
            return self._reduce_to_owners_directly(flat, buffer, sizes)
        parts, works = buffer.split(list(sizes)), []
        for owner, part in enumerate(parts):
            if part.numel():
                root = dist.get_global_rank(self._process_group, owner)
                with lost_ranks_named(self.everyone):
                    works.append(dist.reduce(part, root, group=self._process_group, async_op=True))
        received, own = parts[self.rank], flat.split(list(sizes))[self.rank]
        finish = None if buffer is flat else lambda: own.copy_(received)
        return PendingCollective(own, works, self.everyone, self.traffic, finish, keep=(buffer,))

    def _reduce_to_owners_directly(
        self, flat: torch.Tensor, buffer: torch.Tensor, sizes: Sequence[int]
    ) -> PendingCollective:
        """An all-to-all and a local sum: Gloo's own reduction makes owners send as well."""
        own = flat.new_empty(sizes[self.rank])
        received = buffer.new_empty(self.size * own.numel())
        splits = [own.numel()] * self.size
        with lost_ranks_named(self.everyone):
            work = dist.all_to_all_single(
                received, buffer, splits, list(sizes), group=self._process_group, async_op=True
            )

        def finish() -> None:
            own.copy_(received.view(self.size, -1).sum(0, dtype=own.dtype))

        return PendingCollective(own, [work], self.everyone, self.traffic, finish, keep=(buffer, received))

    def all_ranks_true(self, value: bool) -> bool:
        """Whether the value is true on every rank. Synchronises with the host: for setup and checkpoints, never in a step."""
        return all(self.gather_objects(value))

    def gather_objects(self, own: Any) -> list[Any]:
        """Every rank's small Python object, by rank. For setup and checkpoints, never in a step."""
        gathered: list[Any] = [own] * self.size
        if self.size > 1:
            # torch sends objects from the current device, which need not be the model's.
            with lost_ranks_named(self.everyone), current(self._device):
                dist.all_gather_object(gathered, own, group=self._process_group)
        return gathered


def _let_gloo_finish() -> None:
    """At exit, give Gloo's threads a moment to release their tensors.

    wait() returns when a collective is complete, but the thread that completed it still has to release its tensors, for
    which it needs the interpreter. If the script has ended by then, as after the averaging at the end of training, the
    process aborts with "terminate called without an active exception" and the launcher reports a failed run.
    """
    time.sleep(EXIT_SECONDS)

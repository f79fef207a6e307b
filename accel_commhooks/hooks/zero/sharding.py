"""Who owns which elements of which parameter, and how owners get gradients and hand out parameters.

:class:`EvenSlices` gives each rank an even slice of every parameter, so any bucket is balanced: gradients are
reduce-scattered and parameters all-gathered, which together cost what one all-reduce costs. :class:`WholeParameters` gives
each parameter to one rank, in contiguous blocks of the model: gradients are reduced to the owner and parameters broadcast.
Both belong to parameters, never to buckets, so they survive when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...comm.collectives import Communicator
from ...comm.means import scattered_mean
from ...comm.quantised import BLOCK, decode, encode, in_blocks
from ...comm.wire import is_quantised
from ...upstream import foreach

GATHER_BYTES = 8 * 2**20
"""Parameters that are gathered together: small enough for the first layers to start early."""

Flat = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(parameter, flat tensor of as many elements) pairs."""


class Ownership:
    """How parameters are divided among the ranks of a communicator."""

    def __init__(self, comm: Communicator, wire_dtype: torch.dtype | None):
        self.comm, self._wire_dtype = comm, wire_dtype

    def range(self, parameter: torch.Tensor) -> tuple[int, int]:
        """The elements [start, stop) of a parameter that this rank owns."""
        raise NotImplementedError

    def reduce(self, gradients: Flat) -> Callable[[], list[torch.Tensor]]:
        """Start averaging; the function returned waits and gives this rank's part of each gradient, in order."""
        raise NotImplementedError

    def gather(
        self, parameters: Flat, own: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Callable[[], None]:
        """Start completing parameters from their owners' parts; the function returned waits and writes them.

        ``own`` are this rank's parts, which may be views of the parameters; ``dtype`` is the type in which they travel.
        """
        raise NotImplementedError

    def gather_one(self, own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor from the ranks' parts of it. Blocking; for checkpoints."""
        whole = torch.empty(like.numel(), dtype=own.dtype, device=own.device)
        self.gather([(like, whole)], [own.reshape(-1)])()
        return whole.view(like.shape)


class EvenSlices(Ownership):
    """Rank r owns the r-th of W slices of ceil(n / W) elements of every parameter."""

    def _chunk(self, parameter: torch.Tensor) -> int:
        chunk = -(-parameter.numel() // self.comm.size)
        # Digits share a scale: those of a parameter, so that they do not depend on what is beside it.
        return in_blocks(chunk) if is_quantised(self._wire_dtype) else chunk

    def range(self, parameter: torch.Tensor) -> tuple[int, int]:
        chunk, n = self._chunk(parameter), parameter.numel()
        return min(self.comm.rank * chunk, n), min((self.comm.rank + 1) * chunk, n)

    def _fits(self, tensors: Flat) -> bool:
        """Whether a tensor alone is cut into equal slices: then it needs no copy in which they lie side by side."""
        return len(tensors) == 1 and not self._is_padded(tensors)

    def _is_padded(self, tensors: Flat) -> bool:
        return any(flat.numel() < self.comm.size * self._chunk(parameter) for parameter, flat in tensors)

    def _room(self, tensors: Flat, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room for slices that lie side by side; zero where there may be padding."""
        make = torch.zeros if self._is_padded(tensors) else torch.empty
        return make(size, dtype=dtype, device=tensors[0][1].device)

    def reduce(self, gradients: Flat) -> Callable[[], list[torch.Tensor]]:
        """The gradients themselves may be overwritten."""
        chunks = [self._chunk(p) for p, _ in gradients]
        first = gradients[0][1]
        if self._fits(gradients):
            rows = first.view(self.comm.size, -1)
        else:
            rows = self._room(gradients, (self.comm.size, sum(chunks)), first.dtype)
            foreach.copy(*_slices(rows, gradients, chunks))
        own = torch.empty(rows.shape[1], dtype=first.dtype, device=first.device)
        pending = scattered_mean(self.comm, own, rows, self._wire_dtype)

        def finish() -> list[torch.Tensor]:
            parts = pending.wait().split(chunks)
            return [part[: _length(self.range(p))] for part, (p, _) in zip(parts, gradients, strict=True)]

        return finish

    def gather(
        self, parameters: Flat, own: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Callable[[], None]:
        chunks = [self._chunk(p) for p, _ in parameters]
        first = parameters[0][1]
        if is_quantised(dtype) and first.is_floating_point():
            return self._gather_changes(parameters, own, chunks)
        dtype = dtype or first.dtype
        if self._fits(parameters) and own[0].dtype == dtype == first.dtype:
            straight = self.comm.all_gather(first, own[0])

            def wait() -> None:
                straight.wait()

            return wait
        mine = self._room(parameters, (sum(chunks),), dtype)
        foreach.copy([part[: len(o)] for part, o in zip(mine.split(chunks), own, strict=True)], own)
        rows = torch.empty(self.comm.size, len(mine), dtype=dtype, device=first.device)
        pending = self.comm.all_gather(rows.view(-1), mine)

        def finish() -> None:
            pending.wait()
            sources, targets = _slices(rows, parameters, chunks)
            foreach.copy(targets, sources)

        return finish

    def _gather_changes(self, parameters: Flat, own: Sequence[torch.Tensor], chunks: list[int]) -> Callable[[], None]:
        """Weights would lose too much in digits, so what travels is how far owners are from what all ranks have.

        What rounding takes of it is a part of the next distance, and so is not lost.
        """
        first = parameters[0][1]
        mine = self._room(parameters, (sum(chunks),), own[0].dtype)
        parts = [part[: len(o)] for part, o in zip(mine.split(chunks), own, strict=True)]
        foreach.copy(parts, own)
        written = [flat[slice(*self.range(parameter))] for parameter, flat in parameters]
        foreach.subtract(parts, foreach.converted(written, [mine.dtype] * len(written)))
        message = encode(mine.view(-1, BLOCK))
        messages = message.new_empty(self.comm.size * len(message))
        pending = self.comm.all_gather(messages, message)

        def finish() -> None:
            pending.wait()
            rows = torch.empty(self.comm.size, len(mine) // BLOCK, BLOCK, dtype=mine.dtype, device=first.device)
            sources, targets = _slices(
                decode(messages.view(self.comm.size, -1), rows).view(self.comm.size, -1), parameters, chunks
            )
            foreach.add(targets, foreach.converted(sources, [target.dtype for target in targets]))

        return finish


class WholeParameters(Ownership):
    """Each parameter belongs to one rank: contiguous blocks of the model, cut where a rank's even share is reached."""

    def __init__(self, comm: Communicator, wire_dtype: torch.dtype | None, model_order: Sequence[torch.Tensor]):
        super().__init__(comm, wire_dtype)
        total = sum(p.numel() for p in model_order)
        before, self._owner = 0, {}
        for parameter in model_order:
            middle = before + parameter.numel() / 2
            self._owner[id(parameter)] = min(int(middle * comm.size / max(total, 1)), comm.size - 1)
            before += parameter.numel()

    def range(self, parameter: torch.Tensor) -> tuple[int, int]:
        return (0, parameter.numel()) if self._owner[id(parameter)] == self.comm.rank else (0, 0)

    def _by_owner(self, pairs: Flat) -> list[tuple[int, list[torch.Tensor]]]:
        owners = sorted({self._owner[id(p)] for p, _ in pairs})
        return [(owner, [flat for p, flat in pairs if self._owner[id(p)] == owner]) for owner in owners]

    def reduce(self, gradients: Flat) -> Callable[[], list[torch.Tensor]]:
        sizes = [0] * self.comm.size
        ordered = []
        for owner, flats in self._by_owner(gradients):
            sizes[owner] = sum(flat.numel() for flat in flats)
            ordered += flats
        pending = self.comm.reduce_to_owners(torch.cat(ordered), sizes, wire_dtype=self._wire_dtype)

        def finish() -> list[torch.Tensor]:
            lengths = [_length(self.range(p)) for p, _ in gradients]
            return list(pending.wait().split(lengths))

        return finish

    def gather(
        self, parameters: Flat, own: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Callable[[], None]:
        parts = {id(flat): part for (_, flat), part in zip(parameters, own, strict=True) if len(part)}
        under_way = []
        for owner, flats in self._by_owner(parameters):
            sent = torch.cat([parts.get(id(flat), flat) for flat in flats]).to(dtype or flats[0].dtype)
            under_way.append((flats, self.comm.broadcast(sent, source=owner)))

        def finish() -> None:
            for flats, pending in under_way:
                foreach.copy(flats, pending.wait().split([flat.numel() for flat in flats]))

        return finish


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _slices(rows: torch.Tensor, tensors: Flat, chunks: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same elements in rows [W, sum of chunks] and in flat tensors, as pairs of views without the padding."""
    in_rows, in_flat = [], []
    for part, (_, flat), chunk in zip(rows.split(chunks, dim=1), tensors, chunks, strict=True):
        full, rest = divmod(flat.numel(), chunk) if chunk else (0, 0)
        if full:
            in_rows.append(part[:full])
            in_flat.append(flat[: full * chunk].view(full, chunk))
        if rest:
            in_rows.append(part[full, :rest])
            in_flat.append(flat[full * chunk :])
    return in_rows, in_flat

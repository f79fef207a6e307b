"""Who owns which elements of which parameter, and how owners get gradients and hand out parameters.

:class:`EvenSlices` gives each rank an even slice of every parameter, so any bucket is balanced: gradients are
reduce-scattered and parameters all-gathered, which together cost what one all-reduce costs. :class:`WholeParameters` gives
each parameter to one rank, in contiguous blocks of the model: gradients are reduced to the owner and parameters broadcast.
Both belong to parameters, never to buckets, so they survive when DDP rebuilds its buckets. :class:`Shards` are the owned
parts, in a form that an optimizer can step with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ...comm.collectives import Communicator

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

    def gather(self, parameters: Flat, *, dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Start completing parameters from their owners' parts; the function returned waits and writes the rest."""
        raise NotImplementedError

    def gather_one(self, own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor from the ranks' parts of it. Blocking; for checkpoints."""
        whole = torch.empty(like.numel(), dtype=own.dtype, device=own.device)
        start, stop = self.range(like)
        whole[start:stop].copy_(own.view(-1))
        self.gather([(like, whole)])()
        return whole.view(like.shape)


class EvenSlices(Ownership):
    """Rank r owns the r-th of W slices of ceil(n / W) elements of every parameter."""

    def _chunk(self, parameter: torch.Tensor) -> int:
        return -(-parameter.numel() // self.comm.size)

    def range(self, parameter: torch.Tensor) -> tuple[int, int]:
        chunk, n = self._chunk(parameter), parameter.numel()
        return min(self.comm.rank * chunk, n), min((self.comm.rank + 1) * chunk, n)

    def reduce(self, gradients: Flat) -> Callable[[], list[torch.Tensor]]:
        size, chunks = self.comm.size, [self._chunk(p) for p, _ in gradients]
        first = gradients[0][1]
        rows = torch.zeros(size, sum(chunks), dtype=first.dtype, device=first.device)
        offset = 0
        for (_, gradient), chunk in zip(gradients, chunks, strict=True):
            _copy_rows(rows[:, offset : offset + chunk], gradient, to_rows=True)
            offset += chunk
        own = torch.empty(rows.shape[1], dtype=first.dtype, device=first.device)
        pending = self.comm.reduce_scatter(own, rows, wire_dtype=self._wire_dtype)

        def finish() -> list[torch.Tensor]:
            parts = pending.wait().split(chunks)
            return [part[: _length(self.range(p))] for part, (p, _) in zip(parts, gradients, strict=True)]

        return finish

    def gather(self, parameters: Flat, *, dtype: torch.dtype | None = None) -> Callable[[], None]:
        chunks = [self._chunk(p) for p, _ in parameters]
        first = parameters[0][1]
        dtype = dtype or first.dtype
        own = torch.zeros(sum(chunks), dtype=dtype, device=first.device)
        offset = 0
        for (parameter, flat), chunk in zip(parameters, chunks, strict=True):
            start, stop = self.range(parameter)
            own[offset : offset + stop - start].copy_(flat[start:stop])
            offset += chunk
        rows = torch.empty(self.comm.size, own.numel(), dtype=dtype, device=first.device)
        pending = self.comm.all_gather(rows.view(-1), own)

        def finish() -> None:
            pending.wait()
            offset = 0
            for (_, flat), chunk in zip(parameters, chunks, strict=True):
                _copy_rows(rows[:, offset : offset + chunk], flat, to_rows=False)
                offset += chunk

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

    def gather(self, parameters: Flat, *, dtype: torch.dtype | None = None) -> Callable[[], None]:
        under_way = [
            (flats, self.comm.broadcast(torch.cat(flats).to(dtype or flats[0].dtype), source=owner))
            for owner, flats in self._by_owner(parameters)
        ]

        def finish() -> None:
            for flats, pending in under_way:
                for flat, part in zip(flats, pending.wait().split([f.numel() for f in flats]), strict=True):
                    flat.copy_(part)

        return finish


class Shards:
    """The owned part of each parameter as a parameter of its own: a view, or a master copy with a wire_dtype."""

    def __init__(self, ownership: Ownership, names: dict[torch.Tensor, str], wire_dtype: torch.dtype | None):
        self.ownership, self._names, self._wire_dtype = ownership, names, wire_dtype
        self._known = {id(p) for p in names}
        self._shards: dict[int, torch.nn.Parameter] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._known

    def overlaps(self, other: Shards) -> bool:
        """Whether some parameter is in both."""
        return not self._known.isdisjoint(other._known)

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The type in which the optimizer steps."""
        if self._wire_dtype is None:
            return parameter.dtype
        return torch.promote_types(parameter.dtype, torch.float32)

    def get(self, parameter: torch.Tensor) -> torch.nn.Parameter | None:
        """As the last step left it."""
        return self._shards.get(id(parameter))

    @torch.no_grad()
    def refresh(self, parameter: torch.Tensor) -> torch.nn.Parameter:
        """The shard, brought up to date with the parameter: it may have new storage, or weights may have been loaded."""
        start, stop = self.ownership.range(parameter)
        own = parameter.detach().view(-1)[start:stop]
        data = own if self._wire_dtype is None else self._master(parameter, own)
        shard = self._shards.get(id(parameter))
        if shard is None:
            shard = self._shards[id(parameter)] = torch.nn.Parameter(data)
        shard.data = data
        return shard

    def _master(self, parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The master copy where the parameter equals its rounding; elsewhere the parameter's own value."""
        shard = self._shards.get(id(parameter))
        master = shard.detach() if shard is not None else self._loaded.pop(self._names[parameter], None)
        written = own.to(dtype=self.dtype(parameter), copy=True)
        if master is None or master.shape != own.shape:
            return written
        master = master.to(written)
        rounded = master.to(own.dtype).to(self._wire_dtype).to(own.dtype)
        return torch.where(own == rounded, master, written)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's masters, by name."""
        if self._wire_dtype is None:
            return dict(self._loaded)
        kept = {name: self._shards[id(p)] for p, name in self._names.items() if id(p) in self._shards}
        return {**self._loaded, **{name: shard.detach().clone() for name, shard in kept.items()}}

    def load_state_dict(self, masters: dict[str, torch.Tensor]) -> None:
        self._loaded = dict(masters)
        self._shards.clear()

    def merge(self, of_all_ranks: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Masters of all ranks of another run, concatenated and divided again."""
        parts: dict[str, list[torch.Tensor]] = {}
        for masters in of_all_ranks:
            for name, part in masters.items():
                parts.setdefault(name, []).append(part)
        merged = {}
        for parameter, name in self._names.items():
            if name in parts:
                start, stop = self.ownership.range(parameter)
                merged[name] = torch.cat(parts[name])[start:stop].clone()
        return merged


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _copy_rows(rows: torch.Tensor, flat: torch.Tensor, *, to_rows: bool) -> None:
    """Between a flat tensor and rows [W, chunk] of which the last ones may be partly or wholly padding."""
    chunk, n = rows.shape[1], flat.numel()
    full = n // chunk if chunk else 0
    views = [(rows[:full], flat[: full * chunk].view(full, chunk))]
    if n % max(chunk, 1):
        views.append((rows[full, : n - full * chunk], flat[full * chunk :]))
    for row, piece in views:
        if to_rows:
            row.copy_(piece)
        else:
            piece.copy_(row)

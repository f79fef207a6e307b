"""Who owns which elements of which parameter, and how owners get gradients and hand out parameters.

:class:`EvenSlices` gives each rank an even slice of every parameter, so any bucket is balanced: gradients are
reduce-scattered and parameters all-gathered, which together cost what one all-reduce costs. :class:`WholeParameters` gives
each parameter to one rank, in contiguous blocks of the model: gradients are reduced to the owner and parameters broadcast.
Both belong to parameters, never to buckets, so they survive when DDP rebuilds its buckets. :class:`Shards` are the owned
parts, in a form that an optimizer can step with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ...comm.collectives import Communicator
from ...upstream import foreach
from ...upstream.devices import copies_on_host

GATHER_BYTES = 8 * 2**20
"""Parameters that are gathered together: small enough for the first layers to start early."""

PIECE_BYTES = 128 * 2**20
"""Masters that are compared with parameters in one call: few calls, and copies that do not count beside the model."""

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
        return -(-parameter.numel() // self.comm.size)

    def range(self, parameter: torch.Tensor) -> tuple[int, int]:
        chunk, n = self._chunk(parameter), parameter.numel()
        return min(self.comm.rank * chunk, n), min((self.comm.rank + 1) * chunk, n)

    def _fits(self, tensors: Flat) -> bool:
        """Whether a tensor alone is cut into equal slices: then it needs no copy in which they lie side by side."""
        return len(tensors) == 1 and tensors[0][1].numel() % self.comm.size == 0

    def _room(self, tensors: Flat, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room for slices that lie side by side; zero where there may be padding."""
        padded = any(flat.numel() % self.comm.size for _, flat in tensors)
        return (torch.zeros if padded else torch.empty)(size, dtype=dtype, device=tensors[0][1].device)

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
        pending = self.comm.reduce_scatter(own, rows, wire_dtype=self._wire_dtype)

        def finish() -> list[torch.Tensor]:
            parts = pending.wait().split(chunks)
            return [part[: _length(self.range(p))] for part, (p, _) in zip(parts, gradients, strict=True)]

        return finish

    def gather(
        self, parameters: Flat, own: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Callable[[], None]:
        chunks = [self._chunk(p) for p, _ in parameters]
        first = parameters[0][1]
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

    def owned(self, parameter: torch.Tensor) -> torch.Tensor:
        """The owned part, a view."""
        start, stop = self.ownership.range(parameter)
        return parameter.detach().view(-1)[start:stop]

    @torch.no_grad()
    def refresh(self, parameters: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
        """The shards, brought up to date: a parameter may have new storage, or weights may have been loaded."""
        own = [self.owned(parameter) for parameter in parameters]
        data = own if self._wire_dtype is None else self._masters(parameters, own)
        shards = []
        for parameter, each in zip(parameters, data, strict=True):
            shard = self._shards.get(id(parameter))
            if shard is None:
                shard = self._shards[id(parameter)] = torch.nn.Parameter(each)
            shard.data = each
            shards.append(shard)
        return shards

    def _masters(self, parameters: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Master copies where the parameters equal their rounding; elsewhere the parameters' own values."""
        masters: list[torch.Tensor] = []
        known: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, part in zip(parameters, own, strict=True):
            shard = self._shards.get(id(parameter))
            loaded = self._loaded.pop(self._names[parameter], None) if shard is None else None
            master = shard.detach() if shard is not None else loaded
            if master is None or master.shape != part.shape:
                masters.append(part.to(dtype=self.dtype(parameter), copy=True))
                continue
            # What was loaded belongs to whoever loaded it.
            masters.append(master.to(device=part.device, dtype=self.dtype(parameter), copy=loaded is not None))
            if len(part):
                known.append((masters[-1], part))
        for some in _in_pieces(known):
            kept, written = torch.cat([master for master, _ in some]), torch.cat([part for _, part in some])
            right = written == kept.to(self._wire_dtype).to(written.dtype)
            chosen = torch.where(right, kept, written.to(kept.dtype))
            foreach.copy([master for master, _ in some], chosen.split([len(master) for master, _ in some]))
        return masters

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's masters, by name."""
        if self._wire_dtype is None:
            return dict(self._loaded)
        kept = {name: self._shards[id(p)] for p, name in self._names.items() if id(p) in self._shards}
        return {**self._loaded, **copies_on_host(kept)}

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


def _in_pieces(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Pairs of the same types, together of at most PIECE_BYTES or one."""
    piece: list[tuple[torch.Tensor, torch.Tensor]] = []
    filled = 0
    for pair in pairs:
        types = [each.dtype for each in pair]
        if piece and (filled + pair[0].nbytes > PIECE_BYTES or types != [each.dtype for each in piece[0]]):
            yield piece
            piece, filled = [], 0
        piece.append(pair)
        filled += pair[0].nbytes
    if piece:
        yield piece

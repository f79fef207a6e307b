"""The owned part of each parameter, in a form that an optimizer can step with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...comm.wire import is_quantised
from ...upstream import foreach
from ...upstream.devices import copies_on_host
from .sharding import Ownership

PIECE_BYTES = 128 * 2**20
"""Masters that are compared with parameters in one call: few calls, and copies that do not count beside the model."""


Slices = dict[str, torch.Tensor]


class Shards:
    """The owned part of each parameter as a parameter of its own: a view, or a master copy with a wire_dtype."""

    def __init__(self, ownership: Ownership, names: dict[torch.Tensor, str], wire_dtype: torch.dtype | None):
        self.ownership, self._names, self._wire_dtype = ownership, names, wire_dtype
        self._known = {id(p) for p in names}
        self._shards: dict[int, torch.nn.Parameter] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._delivered: dict[int, torch.Tensor] = {}
        """The owned part as the last gather left it, by the parameter's id, where it cannot be told from the master."""

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

    def delivered(self, parameters: Sequence[torch.Tensor]) -> None:
        """A gather has written these parameters."""
        if not is_quantised(self._wire_dtype):
            return
        own = [self.owned(parameter) for parameter in parameters]
        kept = [
            self._delivered.setdefault(id(parameter), torch.empty_like(part))
            for parameter, part in zip(parameters, own, strict=True)
        ]
        foreach.copy(kept, own)

    def _masters(self, parameters: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Master copies where the parameters are as they were written; elsewhere the parameters' own values."""
        masters: list[torch.Tensor] = []
        known: list[tuple[torch.Tensor, ...]] = []
        in_digits = is_quantised(self._wire_dtype)
        for parameter, part in zip(parameters, own, strict=True):
            shard = self._shards.get(id(parameter))
            loaded = self._loaded.pop(self._names[parameter], None) if shard is None else None
            master = shard.detach() if shard is not None else loaded
            left = self._delivered.get(id(parameter)) if in_digits else part
            if master is None or left is None or not master.shape == left.shape == part.shape:
                masters.append(part.to(dtype=self.dtype(parameter), copy=True))
                continue
            # What was loaded belongs to whoever loaded it.
            masters.append(master.to(device=part.device, dtype=self.dtype(parameter), copy=loaded is not None))
            if len(part):
                known.append((masters[-1], part, left) if in_digits else (masters[-1], part))
        for some in _in_pieces(known):
            kept, written, *delivered = (torch.cat(column) for column in zip(*some, strict=True))
            expected = delivered[0] if in_digits else kept.to(self._wire_dtype).to(written.dtype)
            chosen = torch.where(written == expected, kept, written.to(kept.dtype))
            foreach.copy([master for master, *_ in some], chosen.split([len(master) for master, *_ in some]))
        return masters

    def state_dict(self) -> dict[str, Slices]:
        """This rank's masters, and in digits what gathers have left, by name."""
        masters: Slices = {}
        if self._wire_dtype is not None:
            masters = {name: self._shards[id(p)] for p, name in self._names.items() if id(p) in self._shards}
        delivered = {name: self._delivered[id(p)] for p, name in self._names.items() if id(p) in self._delivered}
        return {"masters": {**self._loaded, **copies_on_host(masters)}, "delivered": copies_on_host(delivered)}

    def load_state_dict(self, state: dict[str, Slices]) -> None:
        self._loaded = dict(state["masters"])
        self._shards.clear()
        left = state.get("delivered", {})
        self._delivered = {id(p): left[name].to(p.device, copy=True) for p, name in self._names.items() if name in left}

    def merge(self, states: Sequence[dict[str, Slices]]) -> dict[str, Slices]:
        """From all ranks of another run."""
        return {kind: self._merged(state.get(kind, {}) for state in states) for kind in ("masters", "delivered")}

    def _merged(self, of_all_ranks: Iterable[Slices]) -> Slices:
        """Slices of all ranks, concatenated and divided again."""
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


def _in_pieces(rows: list[tuple[torch.Tensor, ...]]) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Rows of the same types, whose first tensors have together at most PIECE_BYTES, or one."""
    piece: list[tuple[torch.Tensor, ...]] = []
    filled = 0
    for row in rows:
        types = [each.dtype for each in row]
        if piece and (filled + row[0].nbytes > PIECE_BYTES or types != [each.dtype for each in piece[0]]):
            yield piece
            piece, filled = [], 0
        piece.append(row)
        filled += row[0].nbytes
    if piece:
        yield piece

"""Averaging what changed since the last averaging, instead of the weights themselves.

All ranks share an anchor: the weights that they had in common after the last averaging. Each rank sends the difference
between its weights and the anchor; the mean of the differences is what the outer optimizer steps with to move the anchor
(SlowMo, arXiv:1910.00643; DiLoCo, arXiv:2311.08105). A plain mean is an outer learning rate of 1 without momentum.
"""

from __future__ import annotations

import torch

from ...comm.collectives import Communicator
from ...comm.hierarchy import MeanOverRanks
from ...comm.wire import wire_dtype_named
from ...upstream.devices import copies_on_host
from .averaging import Exchange, Piece
from .distance import Distance
from .options import AveragingOptions

Tensors = dict[str, torch.Tensor]


class ChangeAverager:
    """The anchor, the outer optimizer's momentum, and a change that may be under way. Tensors are keyed by name."""

    def __init__(self, options: AveragingOptions, comm: Communicator):
        # In the background, a change has a group of its own, so that the script's collectives do not queue behind it.
        background = comm.subgroup([range(comm.size)]) if options.overlap_steps else None
        self._mean = MeanOverRanks(
            comm, wire_dtype_named(options.wire_dtype), group=background, in_background=background is not None
        )
        self._lr, self._momentum_factor, self._nesterov = options.outer_optimizer()
        self.anchor: Tensors = {}
        self.momentum: Tensors = {}
        self.sent: Tensors = {}
        """The weights as they were when a change was sent; empty when none is under way."""
        self._exchange: Exchange | None = None
        self._distance = Distance()

    def average(self, parameters: Tensors) -> Distance:
        """Blocking: every rank moves to the new anchor. Besides anchor and momentum only slices are in memory."""
        names, targets = list(parameters), list(parameters.values())
        distance = Distance()

        def read(piece: Piece) -> torch.Tensor:
            return piece.of(targets[piece.index]) - piece.of(self.anchor[names[piece.index]])

        def write(piece: Piece, change: torch.Tensor) -> None:
            anchor, own = piece.of(self.anchor[names[piece.index]]), piece.of(targets[piece.index])
            distance.add(own, anchor + change)
            own.copy_(self._move_anchor(names[piece.index], piece, change))

        Exchange(self._mean, targets, read, write).run()
        return distance

    def send(self, parameters: Tensors) -> None:
        """Overlapped: the change travels while local steps go on, a part of it after each (:meth:`advance`)."""
        self.sent = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.resend(parameters)

    def take_anchors(self, parameters: Tensors) -> None:
        """Parameters without an anchor, because local steps begin or they were frozen until now, get one."""
        for name, parameter in parameters.items():
            if name not in self.anchor:
                self.anchor[name] = parameter.detach().clone()

    def cancel(self) -> None:
        """Forget everything: weights were replaced. For a change under way ranks still wait for each other's parts."""
        if self._exchange is not None:
            self._exchange.drop()
        self._exchange = None
        for kept in (self.sent, self.anchor, self.momentum):
            kept.clear()

    def resend(self, parameters: Tensors) -> None:
        """Prepare the exchange of what is in ``sent``; after a resume, that of the run before."""
        receiving = {name: parameter for name, parameter in parameters.items() if name in self.sent}
        names, targets = list(receiving), list(receiving.values())
        distance = self._distance = Distance()

        def read(piece: Piece) -> torch.Tensor:
            return piece.of(self.sent[names[piece.index]]) - piece.of(self.anchor[names[piece.index]])

        def write(piece: Piece, change: torch.Tensor) -> None:
            name = names[piece.index]
            sent = piece.of(self.sent[name])
            distance.add(sent, piece.of(self.anchor[name]) + change)
            # Local steps were taken meanwhile: move by the distance from the weights that were sent to the new anchor.
            piece.of(targets[piece.index]).add_(self._move_anchor(name, piece, change) - sent)

        self._exchange = Exchange(self._mean, targets, read, write)

    def advance(self, fraction: float) -> None:
        """Send more of the change, until a fraction of it is on its way."""
        assert self._exchange is not None
        self._exchange.advance(fraction)

    def receive(self) -> Distance:
        """Wait for the change that was sent, and apply it."""
        assert self._exchange is not None
        self._exchange.finish()
        self._exchange, self.sent = None, {}
        return self._distance

    def _move_anchor(self, name: str, piece: Piece, change: torch.Tensor) -> torch.Tensor:
        """The outer optimizer: SGD on the negative averaged change, momentum as torch.optim.SGD has it."""
        if self._momentum_factor:
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(self.anchor[name])
            momentum = piece.of(self.momentum[name]).mul_(self._momentum_factor).add_(change)
            change = change + self._momentum_factor * momentum if self._nesterov else momentum
        return piece.of(self.anchor[name]).add_(change, alpha=self._lr)

    def state_dict(self) -> dict[str, Tensors]:
        kept = {"anchor": self.anchor, "momentum": self.momentum, "sent": self.sent}
        return {kind: copies_on_host(of) for kind, of in kept.items()}

    def load_state_dict(self, state: dict[str, Tensors], parameters: Tensors) -> None:
        for kept, kind in ((self.anchor, "anchor"), (self.momentum, "momentum"), (self.sent, "sent")):
            kept.clear()
            kept.update({n: t.to(parameters[n], copy=True) for n, t in state[kind].items() if n in parameters})

"""Where a backward of a model begins and ends, however the script runs it.

It is watched from the outputs of DDP's forward, because reentrant checkpointing runs backwards inside the outermost one, and
what is trainable changes. A loss that does not go through the outputs is noticed by a parameter's first gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..upstream import seams
from ..upstream.callbacks import weak_method
from .outputs import tensors_in

Versions = list[tuple[int, int] | None]


class BackwardWatch:
    """Calls ``begins`` once for each outermost backward, and ``unreduced_ended`` after one that DDP did not reduce."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], begins: Callable[[], None], unreduced_ended: Callable[[], None]
    ):
        self._parameters = list(parameters)
        self._begins, self._unreduced_ended = weak_method(begins), weak_method(unreduced_ended)
        self._under_way = False
        self._expects_unreduced = False
        """Whether DDP was muted in a forward whose backward has not come yet."""
        self._before_unreduced: Versions | None = None
        """In a backward that DDP does not reduce: the gradients before it."""
        self._watched: list[torch.Tensor] = []
        self._end_watch: Callable[[], None] = lambda: None

    def stop(self) -> None:
        self._end_watch()

    def after_forward(self, output: Any, *, unreduced: bool) -> None:
        """A forward in grad mode has returned; ``unreduced`` if DDP was muted in it."""
        reached = weak_method(self._output_gradient)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
        for tensor in outputs:
            tensor.register_hook(lambda _: reached(unreduced))
        self._expects_unreduced |= unreduced
        if unreduced or not outputs:
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        if [id(p) for p in trainable] != [id(p) for p in self._watched]:
            self._end_watch()
            self._watched = trainable
            arrived = weak_method(self._parameter_gradient)
            self._end_watch = torch.autograd.graph.register_multi_grad_hook(trainable, arrived, mode="any").remove

    def bucket_arrived(self) -> None:
        """DDP hands over a bucket."""
        if not self._under_way:
            self._begin()

    def _parameter_gradient(self, gradient: torch.Tensor) -> None:
        self._output_gradient(self._expects_unreduced)

    def _output_gradient(self, unreduced: bool) -> None:
        if not any(parameter.requires_grad for parameter in self._parameters):
            return  # the gradient only passes through, on its way to another model
        self.bucket_arrived()
        if unreduced and self._before_unreduced is None:
            self._before_unreduced = self._versions()

    def _begin(self) -> None:
        self._under_way = True
        seams.at_very_end_of_backward(self._end)
        self._begins()

    def _end(self) -> None:
        """The outermost backward is over."""
        if not self._under_way:
            return
        self._under_way = False
        before, self._before_unreduced = self._before_unreduced, None
        if before is not None and before != self._versions():
            self._expects_unreduced = False
            self._unreduced_ended()

    def _versions(self) -> Versions:
        """Changes when gradients are added up; ``torch.autograd.grad`` changes nothing."""
        gradients = [parameter.grad for parameter in self._parameters]
        return [None if gradient is None else (id(gradient), seams.version_of(gradient)) for gradient in gradients]

    def forget_broken(self) -> bool:
        """Forget a backward that raised an error, and so has no end; returns whether there was one."""
        broken = self._under_way and seams.current_backward() == -1
        if broken:
            self._under_way, self._expects_unreduced, self._before_unreduced = False, False, None
        return broken

"""The invariants of error feedback, watched from outside of the hook.

In every backward the mean over the ranks of (gradient + residual before - residual after) is what was applied. A residual
changes in no other way, and what came from gradients that were discarded is taken back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Tensors = dict[str, torch.Tensor]


class Feedback:
    def __init__(self) -> None:
        self._gone: list[tuple[int, str, torch.Tensor, torch.Tensor]] = []
        """(backward, parameter, gradient + residual before - residual after, applied)"""
        self._problems: list[str] = []
        self._backwards = 0
        self._last: Tensors | None = None
        self._before: Tensors = {}
        self._discarded = self._discarded_once = False
        self._arrived: list[tuple[Any, list[torch.Tensor], float, torch.futures.Future]] = []

    def watch(self, handle: Any) -> None:
        """Look into the hook's ``reduce``, if it has residuals at all."""
        self._handle = handle
        self.restart()
        if "error" not in handle.state_dict():
            return
        reduce = handle.hook.reduce

        def watched(bucket):
            if not self._arrived:
                self._begin()
            scale = handle.loss_scale(bucket.buffer().device)
            copies = [gradient.detach().clone() for gradient in bucket.gradients()]
            future = reduce(bucket)
            self._arrived.append((bucket, copies, 1.0 if scale is None else float(scale), future))
            if bucket.is_last():
                self._end()
            return future

        handle.hook.reduce = watched

    def restart(self) -> None:
        """The chain of residuals begins anew: attached anew, or resumed."""
        self._last, self._discarded, self._discarded_once, self._arrived = None, False, False, []

    def discarded(self) -> None:
        """The gradients of the last backward were cleared without a step."""
        self._discarded = True

    def _errors(self) -> Tensors:
        return self._handle.state_dict()["error"]

    def _begin(self) -> None:
        now = self._errors()
        if self._last is not None:
            expected = self._before if self._discarded else self._last
            for name, error in now.items():
                if name not in expected:
                    continue
                same = torch.equal(error, expected[name])
                # The first time there is no copy to go back to, and the residual becomes zero.
                if not same and not (self._discarded and not self._discarded_once and not error.any()):
                    self._problems.append(f"backward {self._backwards}: the residual of {name} is not what was left")
            self._discarded_once |= self._discarded
        self._before, self._discarded = now, False

    def _end(self) -> None:
        after = self._errors()
        for bucket, gradients, scale, future in self._arrived:
            applied = future.value()
            offset = 0
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
                name = self._handle.parameters[parameter]
                result = applied[offset : offset + gradient.numel()].view_as(gradient)
                offset += gradient.numel()
                zero = torch.zeros_like(gradient).reshape(-1)
                kept = [errors.get(name, zero).reshape(-1) for errors in (self._before, after)]
                gone = gradient.reshape(-1) / scale + kept[0] - kept[1]
                self._gone.append((self._backwards, name, gone, result.detach().reshape(-1) / scale))
        self._arrived = []
        self._last = after
        self._backwards += 1

    def verdict(self) -> list[str]:
        """Every rank calls it: what was found wrong."""
        overflows = set()
        for backward, _, gone, applied in self._gone:
            finite = (torch.isfinite(gone).all() & torch.isfinite(applied).all()).float()
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            if not finite:
                overflows.add(backward)  # nothing of it counts, neither gradients nor residuals
        for backward, name, gone, applied in self._gone:
            mean = gone.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            size = float(gone.abs().max()) + float(applied.abs().max()) + 1e-3
            if backward not in overflows and float((mean - applied).abs().max()) > 1e-4 * size:
                self._problems.append(f"backward {backward}: {name} lost {float((mean - applied).abs().max()):.1e}")
        return self._problems

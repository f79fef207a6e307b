"""Agreement while training runs: do all ranks still hold the same bits of what they must have in common?

Every ``check_every`` reductions, and before every save, the ranks compare checksums of what their hook says is common now: one
all-reduce of a few numbers. In a step nothing is waited for: the result is read one period later. Then all ranks together
raise an error that names what differs and where, or take over what rank 0 has (``on_disagreement: repair``).

Checks are counted in reductions of gradients, or in averagings of replicas, and not in steps: a rank that has left out a step
takes part in those as well, or the ranks would hang without any check.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ..comm.checksum import checksum, checksum_of_all
from ..comm.pending import PendingCollective
from ..comm.roll_call import named
from ..config.errors import DisagreementError, launched_rank

if TYPE_CHECKING:
    from .handle import Attachment

logger = logging.getLogger("accel_commhooks")


class Consistency:
    """The checks of one attachment."""

    def __init__(self, attachment: Attachment):
        self._attachment, self._comm, self._hook = attachment, attachment.comm, attachment.hook
        self._every: int = self._hook.options.check_every if self._hook.common() and self._comm.size > 1 else 0
        self._repairs = self._hook.options.on_disagreement == "repair"
        self._since = 0
        self._under_way: PendingCollective | None = None
        self._result: torch.Tensor | None = None
        self.excused = False
        """Whether the script took a step with gradients that were not reduced (no_sync): replicas are its own business."""

    def tick(self, reductions: int = 1) -> None:
        """Ranks reduce together, by this call or next to it. Compare, if it is time to."""
        if not self._every:
            return
        if self._under_way is not None and self._result is None:
            self._result = _to_host(self._under_way.wait())
        self._since += reductions
        if self._since < self._every:
            return
        self._since = 0
        if self._result is not None:
            self._judge(self._result)
        self._result, self._under_way = None, self._comm.maximum(self._sums())

    def check_now(self) -> None:
        """Before a save: compare, and wait for the result. Every rank calls it."""
        if self._every:
            self._judge(self._comm.maximum(self._sums()).wait().cpu())

    # Parts.

    def _sums(self) -> torch.Tensor:
        """[excused, step and a checksum for each kind of common tensors, complements of those].

        The largest of a number and of its complement tell whether it is the same on all ranks.
        """
        device = next(iter(self._attachment.parameters)).device
        excused, step = (torch.full((1,), n, dtype=torch.int64, device=device) for n in (self.excused, self._hook.step))
        kinds = [checksum_of_all(tensors.values(), device).view(1) for tensors in self._hook.common().values()]
        own = torch.cat([step, *kinds])
        return torch.cat([excused, own, ~own])

    def _judge(self, result: torch.Tensor) -> None:
        excused, *numbers = result.tolist()
        largest, complements = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        if excused or largest == [~number for number in complements]:
            return
        text = self._describe()
        if not self._repairs:
            raise DisagreementError(
                f"{text}. Something differs between ranks that must not: code that changes weights or leaves out steps on "
                "one rank only, kernels that differ between devices, failing memory; set on_disagreement: repair to go on "
                "with what rank 0 has, or check_every: 0 to stop comparing"
            )
        if launched_rank() == 0:
            logger.warning("%s; all ranks go on with what rank 0 has", text)
        self._repair()

    def _describe(self) -> str:
        """Which ranks differ from rank 0, and where. All ranks are here together, and time does not matter any more."""
        sums = {
            f"{kind} of '{name}'": int(checksum(tensor))
            for kind, tensors in self._hook.common().items()
            for name, tensor in tensors.items()
        }
        everyone = self._comm.gather_objects({"number of steps": self._hook.step, **sums})
        where = [item for item in everyone[0] if any(other.get(item) != everyone[0][item] for other in everyone)]
        ranks = [r for r, other in enumerate(everyone) if any(other.get(i) != everyone[0][i] for i in where)]
        if not where:
            return f"after step {self._hook.step} ranks had held different weights, and hold the same ones again"
        return (
            f"after step {self._hook.step} {named(ranks)} and rank 0 hold different values, in {len(where)} of "
            f"{len(everyone[0])} things that all ranks have in common, first in the {where[0]}"
        )

    @torch.no_grad()
    def _repair(self) -> None:
        """Through ``data``: a backward may be under way, for which autograd has saved weights."""
        tensors = [tensor for kind in self._hook.common().values() for tensor in kind.values()]
        if self._hook.optimizer_state_is_common:
            tensors += self._optimizer_state()
        for tensor in tensors:
            whole = tensor.data.contiguous()
            self._comm.broadcast(whole).wait()
            tensor.data.copy_(whole)
        self._hook.step = self._comm.gather_objects(self._hook.step)[0]

    def _optimizer_state(self) -> list[torch.Tensor]:
        """Moments that every rank has; what a rank has alone stays as it is."""
        found = {}
        for index, optimizer in enumerate(self._attachment.clock.optimizers):
            for parameter, name in self._attachment.parameters.items():
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        found[index, name, key, tuple(value.shape)] = value
        everyone = self._comm.gather_objects(list(found))
        return [found[key] for key in everyone[0] if all(key in other for other in everyone)]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is not waited for: it is complete long before it is read."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""The slot: what DDP's one communication hook forwards to.

DDP takes a communication hook once and never gives it up. So DDP is given a slot, and an attached hook or plain averaging
takes its place in it. A later attach() uses the same slot again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.process_group import GradBucket
from ..hooks.base import new_future
from ..upstream.devices import without_autocast
from . import compatibility

if TYPE_CHECKING:
    from ..hooks.base import CommHook
    from .handle import Attachment

_slots: weakref.WeakKeyDictionary[DistributedDataParallel, Slot] = weakref.WeakKeyDictionary()


class Slot:
    """Forwards buckets to an attached hook, or to plain averaging.

    DDP's C++ side holds the slot where the garbage collector cannot see it, so the slot must not keep DDP alive: it refers
    to the attachment weakly.
    """

    def __init__(self, plain: CommHook) -> None:
        self._attachment: weakref.ref[Attachment] | None = None
        self.plain = plain
        self.is_silent = False

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Within it nothing is sent: DDP gets its own buckets back."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    @property
    def attachment(self) -> Attachment | None:
        return self._attachment() if self._attachment is not None else None

    @attachment.setter
    def attachment(self, attachment: Attachment | None) -> None:
        self._attachment = weakref.ref(attachment) if attachment is not None else None


def _forward_to_slot(slot, bucket):  # no annotations: DDP compares them with its own classes
    if slot.is_silent:
        future = new_future(bucket.buffer().device)
        future.set_result(bucket.buffer())
        return future
    attachment = slot.attachment
    if attachment is None:
        return slot.plain.reduce(bucket)
    with without_autocast(bucket.buffer().device):
        return _forward_to_hook(attachment, bucket)


def _forward_to_hook(attachment: Attachment, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    compatibility.refuse_graph_capture(attachment.hook.name)
    attachment.clock.bucket_arrived(first=bucket.index() == 0)
    attachment.hook.comm.go_on()
    return attachment.hook.reduce(bucket)


def claim_slot(ddp: DistributedDataParallel, hook_name: str, plain: CommHook) -> Slot:
    """The model's slot, registered with DDP if it is the first time; ``plain`` averages when no hook is attached."""
    slot = _slots.get(ddp)
    if slot is None:
        slot = Slot(plain)
        try:
            ddp.register_comm_hook(slot, _forward_to_slot)
        except RuntimeError as error:
            raise compatibility.second_hook(hook_name, str(error).splitlines()[0]) from None
        _slots[ddp] = slot
    return slot


def attachment_of(model: object) -> Attachment | None:
    """The attachment of a DDP model, or None."""
    slot = _slots.get(model)  # type: ignore[call-overload]
    return slot.attachment if slot is not None else None


def attachments() -> Iterator[tuple[DistributedDataParallel, Attachment]]:
    """All attachments of this process, with their DDP models."""
    for ddp, slot in list(_slots.items()):
        if slot.attachment is not None:
            yield ddp, slot.attachment

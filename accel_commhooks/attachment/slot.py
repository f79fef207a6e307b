"""The slot: what DDP's one communication hook forwards to.

DDP takes a communication hook once and never gives it up. So DDP is given a slot, and an attached hook or plain averaging
takes its place in it. A later attach() uses the same slot again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

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

    def __init__(self) -> None:
        self._attachment: weakref.ref[Attachment] | None = None
        self.plain: CommHook | None = None

    @property
    def attachment(self) -> Attachment | None:
        return self._attachment() if self._attachment is not None else None

    @attachment.setter
    def attachment(self, attachment: Attachment | None) -> None:
        self._attachment = weakref.ref(attachment) if attachment is not None else None


def _forward_to_slot(slot, bucket):  # no annotations: DDP compares them with its own classes
    attachment = slot.attachment
    return (attachment.hook if attachment is not None else slot.plain).reduce(bucket)


def claim_slot(ddp: DistributedDataParallel, hook_name: str) -> Slot:
    """The model's slot, registered with DDP if it is the first time."""
    slot = _slots.get(ddp)
    if slot is None:
        slot = Slot()
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

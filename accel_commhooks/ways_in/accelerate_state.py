"""Hook state in ``accelerator.save_state`` and ``load_state``.

Accelerate offers hooks for both that run on every rank; this is all that ties a hook to an Accelerator. The saved weights
are the consensus: the save hook runs after Accelerate has listed the weights and before it writes them, and averaging is
in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from accelerate import Accelerator

from ..attachment import checkpoint
from ..attachment.handle import Attachment, find_attachment
from ..upstream.live_objects import live_objects

_linked: weakref.WeakSet[Accelerator] = weakref.WeakSet()


def link(accelerator: Accelerator, find: Callable[[torch.nn.Module], Attachment | None] = find_attachment) -> None:
    """Save and restore the hooks of this accelerator's models with its checkpoints.

    ``find`` gives a prepared model's attachment, and may make it then: ``load_state`` comes before the first forward.
    """
    if accelerator in _linked:
        return
    _linked.add(accelerator)

    def before_save(models: list[torch.nn.Module], weights: list, folder: str) -> None:
        for index, attachment in _attachments(models, find):
            attachment.open_consensus()
            attachment.prepare_save()
            checkpoint.save(attachment, folder, index=index)

    def before_load(models: list[torch.nn.Module], folder: str) -> None:
        for index, attachment in _attachments(models, find):
            checkpoint.load(attachment, folder, index=index)

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)


def link_live(find: Callable[[torch.nn.Module], Attachment | None] = find_attachment) -> None:
    """Link every Accelerator of this process; called while one of them prepares a model, so it exists."""
    for accelerator in live_objects(Accelerator):
        link(accelerator, find)


def _attachments(
    models: list[torch.nn.Module], find: Callable[[torch.nn.Module], Attachment | None]
) -> list[tuple[int, Attachment]]:
    found = [(index, find(model)) for index, model in enumerate(models)]
    return [(index, attachment) for index, attachment in found if attachment is not None]

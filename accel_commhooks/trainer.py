"""Callbacks for ``transformers.Trainer``; importing this imports transformers."""

from .ways_in.callbacks import CommHookCallback, ModelAveragingCallback

__all__ = ["CommHookCallback", "ModelAveragingCallback"]

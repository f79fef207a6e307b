"""Communication hooks for data-parallel fine-tuning on slow networks.

``attach`` puts a hook on a DDP model, ``install`` on every DDP model built later, and ``CommHookKwargs`` hands one to an
``Accelerator``. ``accel_commhooks.trainer`` holds the callbacks for ``transformers.Trainer``; transformers is not imported
here.
"""

from .attachment.handle import Attachment, attach
from .attachment.slot import attachment_of
from .config.config import CommHookConfig
from .config.errors import (
    CheckpointError,
    CommHookError,
    CompatibilityError,
    ConfigError,
    DisagreementError,
    LostRankError,
)
from .config.options import HookOptions, option
from .config.registry import available_hooks, get_hook, register_hook
from .config.version import __version__
from .hooks.base import CommHook
from .hooks.local_sgd.averagers import HierarchicalModelAverager, PeriodicModelAverager
from .ways_in.accelerate_kwargs import CommHookKwargs
from .ways_in.install import install

__all__ = [
    "Attachment",
    "CheckpointError",
    "CommHook",
    "CommHookConfig",
    "CommHookError",
    "CommHookKwargs",
    "CompatibilityError",
    "ConfigError",
    "DisagreementError",
    "HierarchicalModelAverager",
    "HookOptions",
    "LostRankError",
    "PeriodicModelAverager",
    "__version__",
    "attach",
    "attachment_of",
    "available_hooks",
    "get_hook",
    "install",
    "option",
    "register_hook",
]

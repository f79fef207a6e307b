"""Communication hooks for data-parallel fine-tuning on slow networks.

``attach`` puts a hook on a DDP model, ``install`` on every DDP model built later, ``CommHookKwargs`` hands one to an
``Accelerator``; ``accel_commhooks.trainer`` holds the callbacks for ``transformers.Trainer``, which is not imported here.
"""

from .attachment import Attachment, attach, attachment_of
from .config import CommHookConfig
from .errors import CommHookError, CompatibilityError, ConfigError
from .hooks.base import CommHook
from .install import install
from .kwargs import CommHookKwargs
from .options import HookOptions, option
from .registry import available_hooks, get_hook, register_hook

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "CommHook",
    "CommHookConfig",
    "CommHookError",
    "CommHookKwargs",
    "CompatibilityError",
    "ConfigError",
    "HookOptions",
    "attach",
    "attachment_of",
    "available_hooks",
    "get_hook",
    "install",
    "option",
    "register_hook",
]

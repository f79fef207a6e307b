"""Running an unchanged script with a hook installed.

``accelerate launch ... -m accel_commhooks FILE train.py --any args`` starts this in every process: it installs the hook
that FILE names and then runs the script as ``python train.py --any args`` would, with its own ``sys.argv``,
``sys.path[0]``, ``__main__`` and exit code.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path

from ..config.config import ENVIRONMENT_VARIABLE, CommHookConfig
from ..config.errors import CommHookError, ConfigError, stop
from ..upstream import seams
from .install import install

USAGE = "usage: accelerate launch [its flags] -m accel_commhooks CONFIG train.py [arguments of train.py]"


def run_script(arguments: list[str]) -> None:
    """Install the hook named by the first argument, and run the script named by the second."""
    try:
        if len(arguments) < 2:
            raise ConfigError(f"a config (a YAML file or a hook's name) and a script are needed\n{USAGE}")
        source, *script = arguments
        config = CommHookConfig.load(source)
        if script[0] != "-m" and not Path(script[0]).is_file():
            raise ConfigError(f"the script {script[0]} does not exist\n{USAGE}")
        install(config)
    except CommHookError as error:
        stop(error)
    # CommHookCallback() and CommHookKwargs() in the script read the same choice.
    os.environ[ENVIRONMENT_VARIABLE] = source
    _add_trainer_callback(config)
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        sys.path[0] = str(Path(script[0]).resolve().parent)
        _run_as_main(script[0])


def _run_as_main(script: str) -> None:
    """Execute a file as ``__main__`` for good, so that pickling and spawned workers find its functions there."""
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _add_trainer_callback(config: CommHookConfig) -> None:
    """Checkpoints, consensus and logs inside a Trainer come from the callback; a script without one is not touched."""

    def make_callback(module: object) -> None:
        from .callbacks import CommHookCallback

        class InstalledCommHookCallback(CommHookCallback):
            """The callback of the hook that the launcher installed."""

            def __init__(self) -> None:
                super().__init__(config)

        seams.add_default_trainer_callback(InstalledCommHookCallback)

    seams.after_import("transformers.trainer", make_callback)

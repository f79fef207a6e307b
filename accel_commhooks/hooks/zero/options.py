"""Options of ZeRO overlap."""

from __future__ import annotations

from dataclasses import dataclass

from ...comm.wire import wire_dtype_option
from ...config.errors import ConfigError, shown
from ...config.options import HookOptions, option

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)


def _are_names(value: list) -> str | None:
    if all(isinstance(name, str) for name in value):
        return None
    return f"elementwise must be a list of optimizer class names, but got {shown(value)}"


@dataclass(kw_only=True)
class ZeroOverlapOptions(HookOptions):
    step: str = option(
        "optimizer",
        "optimizer: step in optimizer.step(); backward: at its end; interleaved: per bucket during backward.",
        choices=("optimizer", "backward", "interleaved"),
    )
    shard_buckets: bool = option(
        True, "true: even slices of every parameter; false: each parameter on one rank, as torch does by default."
    )
    overlap: bool = option(
        True,
        "Gather parameters in the background; false waits in optimizer.step(), for scripts that keep references to them.",
    )
    wire_dtype: str | None = wire_dtype_option(
        "Type in which gradients and parameters travel: fp16, bf16 or int8; owners keep masters in full precision."
    )
    elementwise: list = option(
        [], "Class names of optimizers outside torch.optim that update elements independently.", check=_are_names
    )

    def check(self) -> None:
        if self.wire_dtype == "int8" and not self.shard_buckets:
            raise ConfigError(
                "wire_dtype: int8 needs shard_buckets: true, but got false; set shard_buckets: true, or wire_dtype: bf16"
            )

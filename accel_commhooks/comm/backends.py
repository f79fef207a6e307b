"""Which backend carries a tensor: a process group may have one for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Backends:
    """The backends of one process group."""

    name: str
    """As ``new_group`` takes it, for another group like this one."""
    by_device: dict[str, str]

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Backends:
        """From what was given to ``init_process_group``: ``nccl``, ``cpu:gloo,cuda:nccl``, or nothing."""
        config = dist.get_backend_config(process_group)
        name = dist.get_backend(process_group)
        return cls(
            config if name == "undefined" else name, dict(each.split(":") for each in config.split(",") if ":" in each)
        )

    def of_tensor(self, tensor: torch.Tensor) -> str:
        """The backend for a tensor's device; on the meta device, which has none, any."""
        return self.by_device.get(tensor.device.type) or next(iter(self.by_device.values()), self.name)

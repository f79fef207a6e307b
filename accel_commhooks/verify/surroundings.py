"""What the checks ran on: versions, devices, topology, the speed of the link. For the report."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from ..bench.report import machine, versions
from ..comm.collectives import Communicator

LARGE, SMALL = 4_000_000, 4
REPEATS = 7


def describe(comm: Communicator, device: torch.device) -> dict[str, Any]:
    """Every rank calls it."""
    topology = comm.topology
    return {
        "versions": {**versions(), **_accelerator_versions(device)},
        "backend": comm.backends.name,
        "device": device.type,
        "machines": comm.gather_objects(machine(device)),
        "ranks": comm.size,
        "nodes": len(topology.nodes),
        "ranks_per_node": [len(ranks) for ranks in topology.nodes],
        "link": link(comm, device),
    }


def _accelerator_versions(device: torch.device) -> dict[str, str]:
    found: dict[str, str] = {}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        if torch.cuda.is_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def link(comm: Communicator, device: torch.device) -> dict[str, float]:
    """Latency and bytes per second of an all-reduce among all ranks, the time being the slowest rank's."""
    small, large = (_seconds(comm, torch.ones(size // 4, device=device)) for size in (SMALL, LARGE))
    sent = 2 * (comm.size - 1) / comm.size * LARGE
    return {"latency_s": small, "mb_per_s": sent / large / 1e6, "all_reduce_mb": LARGE / 1e6, "all_reduce_s": large}


def _seconds(comm: Communicator, tensor: torch.Tensor) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        comm.all_reduce(tensor).wait()
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
        times.append(time.perf_counter() - start)
    return max(comm.gather_objects(statistics.median(times[2:])))

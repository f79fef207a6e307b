"""Starting real launchers from tests: two ranks on this machine, a free port, a hard timeout, whole process group killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

SCRIPTS = Path(__file__).parent / "scripts"
PROBE = Path(__file__).parent / "probe"
BIN = Path(sys.executable).parent

ACCELERATE_CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "mixed_precision": "no",
    "main_training_function": "main",
    "rdzv_backend": "static",
    "same_network": True,
}


@dataclass
class Result:
    code: int
    output: str
    folder: Path

    def finals(self) -> list[dict[str, torch.Tensor]]:
        return [torch.load(file, weights_only=True) for file in sorted(self.folder.glob("final_*.pt"))]

    def probe(self) -> list[list[dict]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("probe_*.json"))]

    def check(self) -> Result:
        assert self.code == 0, self.output[-6000:]
        return self


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def accelerate_config(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump({**ACCELERATE_CONFIG, **changes}))
    return file


def hook_config(folder: Path, name: str, **options) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name.replace(':', '_')}.yaml"
    file.write_text(yaml.safe_dump({"comm_hook": {"name": name, **options}}))
    return file


def run(command: list, folder: Path, *, timeout: float = 150, cwd: Path | None = None, **environment: str) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PROBE_FOLDER": str(folder), **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output[-6000:]}") from None
    return Result(process.returncode, output, folder)


def accelerate_launch(arguments: list, folder: Path, *, config: dict | None = None, **kwargs) -> Result:
    file = accelerate_config(folder, **(config or {}))
    launcher = [BIN / "accelerate", "launch", "--config_file", file, "--main_process_port", free_port()]
    return run([*launcher, *arguments], folder, **kwargs)

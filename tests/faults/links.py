"""Links that are cut while ranks train: nodes are network namespaces (benchmarks/slow_link.py), which need root.

``python -m faults.links FOLDER SUBJECT`` is what runs on a node. The store of the process group is on node 0, as with torchrun,
so the other nodes lose it together with the link.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from .oracle import HANG, UNNAMED, Verdict
from .server import PATIENCE, TIMEOUT, failure, import_everything

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from slow_link import CARD, SlowLink, why_not

QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONWARNINGS": "ignore"}
CONNECT = 60.0
"""Seconds for the nodes to import torch and to train for some steps."""


def cut_some(seed: int) -> Iterator[Verdict]:
    """A few cuts, or none where there are no network namespaces."""
    if why_not() is not None:
        print(f"no links were cut: {why_not()}")
        return
    chance = random.Random(seed)
    for nodes, name in zip((2, 3, 2, 3), ("allreduce", "powersgd", "local overlap", "zero"), strict=True):
        yield _cut(name, nodes, chance.randrange(nodes))


def _cut(name: str, nodes: int, node: int) -> Verdict:
    verdict = Verdict("link cut", f"{name}, {nodes} nodes, the link of node {node}")
    command = [sys.executable, "-m", "faults.links"]
    with tempfile.TemporaryDirectory(prefix="links_") as folder, SlowLink(nodes) as lab:
        out = Path(folder)
        processes = lab.start([*command, folder, name], output=subprocess.DEVNULL, environment=QUIET)
        deadline = time.monotonic() + CONNECT
        while len(list(out.glob("*.trains"))) < nodes and time.monotonic() < deadline:
            time.sleep(0.1)
        if len(list(out.glob("*.trains"))) < nodes:
            verdict.blame(UNNAMED, "the nodes did not begin to train")
            return verdict
        subprocess.run(["ip", "-n", lab.namespace(node), "link", "set", CARD, "down"], check=True)
        cut = time.monotonic()
        while any(p.poll() is None for p in processes) and time.monotonic() < cut + PATIENCE + TIMEOUT:
            time.sleep(0.1)
        for rank in range(nodes):
            told = out / f"{rank}.told"
            if not told.exists():
                stack = out / f"{rank}.stack"
                verdict.blame(HANG, f"rank {rank} did not end: {stack.read_text() if stack.exists() else ''}")
                continue
            answer = json.loads(told.read_text())
            if answer["at"] - cut > PATIENCE:
                verdict.blame(HANG, f"rank {rank} ended {answer['at'] - cut:.1f} s after the cut")
            if not answer["named"]:
                verdict.blame(UNNAMED, f"rank {rank}: {answer['where']}")
            verdict.what += (
                f"; rank {rank} after {answer['at'] - cut:.1f} s: {answer['error'].splitlines()[-1].strip()[:120]}"
            )
    return verdict


def node(folder: str, name: str) -> None:
    """Train until something fails, and write down what."""
    import faulthandler

    import torch.distributed as dist
    from models import train

    from .subjects import SUBJECTS, begin

    import_everything()
    rank = int(os.environ["RANK"])
    with (Path(folder) / f"{rank}.stack").open("w") as stack:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
            ddp, optimizer, _ = begin(SUBJECTS[name])
            train(ddp, rank, 5, optimizer=optimizer)
            (Path(folder) / f"{rank}.trains").touch()
            faulthandler.dump_traceback_later(PATIENCE + TIMEOUT - 1, file=stack)
            for step in range(5, 10**6):
                train(ddp, rank, 1, optimizer=optimizer, first=step)
                time.sleep(0.02)
        except BaseException as error:
            outcome = failure(error)
            told = {"at": time.monotonic(), "named": outcome.named, "error": outcome.error, "where": outcome.where}
            (Path(folder) / f"{rank}.unfinished").write_text(json.dumps(told))
            (Path(folder) / f"{rank}.unfinished").rename(Path(folder) / f"{rank}.told")
    time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    node(*sys.argv[1:])

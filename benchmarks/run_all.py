"""Measures everything that the project says about speed and writes docs/benchmarks.md: what ``make bench`` runs.

``python benchmarks/run_all.py peers convergence`` measures only some of it again, ``page`` nothing; the page is always
written again from the results under benchmarks/results. Needs root for the slow-link laboratory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from page import RESULTS, write_page
from slow_link import why_not

from accel_commhooks.bench.report import write_json

ROOT = Path(__file__).resolve().parent.parent
RATE, LINK = "200mbit", "200 Mbit/s"
LOOPBACK = (
    "ddp,noop,allreduce,fp16_compress,bf16_compress,powersgd,powersgd{alternate: true},batched_powersgd,"
    "post_localsgd,zero_overlap"
)
GROWTH = "allreduce,powersgd,powersgd{alternate: true},post_localsgd,zero_overlap"


def run(name: str, command: list[str], *, nodes: int = 1, rate: str | None = None, link: str | None = None) -> None:
    """Run a measurement, in the laboratory if it has more than one node, and note in the result how it was made."""
    output = RESULTS / f"{name}.json"
    words = [*command, "--output", str(output.relative_to(ROOT))]
    if nodes > 1:
        lab = ["benchmarks/slow_link.py", "--nodes", str(nodes), *(["--rate", rate] if rate else []), "--", "python"]
        words = [*lab, *words]
    shown = shlex.join(["python", *words])
    print(f"\n$ {shown}", flush=True)
    started = time.monotonic()
    real = [sys.executable if word == "python" else word for word in ["python", *words]]
    code = subprocess.run(real, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"run_all: `{shown}` failed with code {code}")
    result = json.loads(output.read_text())
    result |= {"command": shown, "took_s": round(time.monotonic() - started)}
    if link is not None:
        result["link"] = link
    write_json(output, result)


def peers() -> None:
    """Ours and others' on the slow link: the bars of all hooks, in one interleaved run."""
    run("peers", ["benchmarks/peers.py"], nodes=2, rate=RATE, link=LINK)


def loopback() -> None:
    """Two ranks on one machine: nearly no network, so what compression itself costs is in plain sight."""
    words = ["-m", "accel_commhooks.cli", "bench", "--ranks", "2", "--steps", "4", "--rounds", "3"]
    run("loopback", [*words, "--hooks", LOOPBACK], link="loopback")


def growth() -> None:
    """Bytes and collectives against the world's size and the model's; time does not matter, so steps are tiny."""
    bench = ["-m", "accel_commhooks.bench", "--batch", "1", "--seq", "8", "--steps", "2", "--rounds", "1"]
    for nodes in (2, 4, 8):
        run(f"world_{nodes}", [*bench, "--params", "1M", "--hooks", GROWTH], nodes=nodes)
    run("size_10M", [*bench, "--params", "10M", "--hooks", GROWTH], nodes=2)
    run("size_100M", [*bench, "--params", "100M", "--hooks", "allreduce,powersgd"], nodes=2)


def convergence() -> None:
    """Seconds to a target loss on the slow link."""
    run("convergence", ["benchmarks/convergence.py"], nodes=2, rate=RATE, link=LINK)


SECTIONS: dict[str, Callable[[], None]] = {
    "peers": peers,
    "loopback": loopback,
    "growth": growth,
    "convergence": convergence,
    "page": lambda: None,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="what to measure again (default: all)")
    chosen = parser.parse_args().sections or list(SECTIONS)
    reason = why_not()
    if reason is not None and set(chosen) - {"loopback", "page"}:
        print(f"run_all: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()
    for name in chosen:
        SECTIONS[name]()
    print(f"\n{write_page(ROOT)} written after {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

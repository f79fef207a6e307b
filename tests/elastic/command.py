"""The command: each script undisturbed and with kills, and how far apart their weights are in the end."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from models import distance
from safetensors.torch import load_file

from .killing import Run, Stuck, draw_kills, steps_for
from .subjects import SUBJECTS, Subject

TOLERANCE = 1e-6
"""A resumed run does the same operations in the same order; only DDP's buckets may be others in its first step, which changes
roundings of gradients of order 0.1, times a rate of 1e-3."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each script")
    parser.add_argument("--scripts", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="more than can be done between the kills when left out")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run under way is ended
    failed = 0
    for name in options.scripts:
        began, subject = time.monotonic(), SUBJECTS[name]
        try:
            problems, text = judge(subject, options.kills, options.seed, options.steps)
        except Stuck as error:
            problems, text = [str(error)], "stuck"
        print(f"{subject.title}: {text}; {time.monotonic() - began:.0f} s; {len(problems)} problems", flush=True)
        print(*problems, sep="\n", end="\n" if problems else "", flush=True)
        failed += bool(problems)
    return bool(failed)


def judge(subject: Subject, count: int, seed: int, steps: int | None = None) -> tuple[list[str], str]:
    """(what is wrong, what happened)"""
    kills = draw_kills(count, seed)
    steps = steps or steps_for(kills)
    patience = 300 + 2 * steps
    with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
        shared = Path(folder)
        whole = Run(subject, shared, shared / "whole", steps, 0).finish([], patience)
        if whole.code != 0:
            return [f"undisturbed it failed:\n{whole.output[-3000:]}"], "not run"
        killed = Run(subject, shared, shared / "killed", steps, count + 2).finish(kills, patience)
        if killed.code != 0:
            return [f"it gave up:\n{killed.output[-3000:]}"], f"{killed.kills} kills"
        off = distance(load_file(shared / "whole/model.safetensors"), load_file(shared / "killed/model.safetensors"))
    problems = []
    if killed.kills != count:
        problems.append(f"it came to its end after {killed.kills} kills of {count}; ask for more --steps")
    if killed.restarts != killed.kills:
        problems.append(f"it failed {killed.restarts - killed.kills} times by itself")
    if "starts afresh" in killed.output:
        problems.append("a hook started afresh")
    if not off <= TOLERANCE:
        problems.append(f"weights differ by {off:.1e}")
    text = f"{steps} steps, {killed.kills} kills ({killed.in_saves} during saves), {killed.restarts} restarts"
    return problems, f"{text}, final difference {off:.1e}"

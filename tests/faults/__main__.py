"""Inject faults: ``cd tests; python -m faults --count 1000 --seed 0``. Exits with 1 if one of them did what it must not."""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import links
from .oracle import CATEGORIES, HANG, UNNAMED, Verdict
from .plan import SHARES, Job, plan, planted
from .plants import PLANTS, SEEN_IN
from .server import import_everything
from .strikes import measure

LONGEST = 150.0
"""Seconds after which a job is ended, whatever it does."""


def in_processes(tasks: Iterable[tuple[Any, Callable[[], Any]]], at_once: int) -> Iterator[tuple[Any, Any]]:
    """(key, result or exception text) of each task, as they end; each runs in a fork of this process."""
    waiting, running = list(tasks)[::-1], {}
    with tempfile.TemporaryDirectory(prefix="jobs_") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    key, task = waiting.pop()
                    pid = _forked(task, folder)
                    running[pid] = (key, time.monotonic())
                for pid, (key, since) in list(running.items()):
                    if time.monotonic() - since > LONGEST:
                        os.killpg(pid, signal.SIGKILL)
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        del running[pid]
                        result = Path(folder) / str(pid)
                        yield key, pickle.loads(result.read_bytes()) if result.exists() else "the job did not end"
                        result.unlink(missing_ok=True)
                time.sleep(0.03)
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _forked(task: Callable[[], Any], folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    try:
        result = task()
    except BaseException:
        result = traceback.format_exc()
    unfinished = Path(folder) / f"{os.getpid()}.unfinished"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(Path(folder) / str(os.getpid()))
    os._exit(0)


def run(jobs: list[Job], at_once: int, show: Callable[[int, Verdict], None]) -> list[Verdict]:
    """The verdicts on all faults of all jobs."""
    needed = sorted({job.needs for job in jobs if job.needs is not None})
    references = dict(in_processes([(need, lambda need=need: measure(*need)) for need in needed], 2))
    for need, reference in references.items():
        assert isinstance(reference, dict), f"an undisturbed run failed: {need}: {reference}"
    verdicts = []
    tasks = [(number, lambda job=job: job.run(references)) for number, job in enumerate(jobs)]
    for number, result in in_processes(tasks, at_once):
        if isinstance(result, str):
            job = jobs[number]
            category = HANG if "did not end" in result else UNNAMED
            result = [Verdict(job.family, str(job), [(category, result)])] * job.faults
        for verdict in result:
            show(number, verdict)
        if len(verdicts) // 100 < (len(verdicts) + len(result)) // 100:
            print(f"{len(verdicts) + len(result)} of {sum(job.faults for job in jobs)}", file=sys.stderr, flush=True)
        verdicts += result
    return verdicts


def find_plants(jobs: list[Job], at_once: int) -> int:
    """1 unless every defect was found as what it is."""
    found: Counter[str | None] = Counter()

    def look(number: int, verdict: Verdict) -> None:
        plant = jobs[number].plant or ""
        found[plant] += SEEN_IN[plant][2] in [category for category, _ in verdict.problems]

    run(jobs, at_once, look)
    for plant, (_, _, category) in SEEN_IN.items():
        print(f"{plant}: {found[plant]} {category}")
    return any(not found[plant] for plant in PLANTS)


def table(verdicts: list[Verdict]) -> str:
    """Faults by kind, and what they led to."""
    kinds = Counter(verdict.kind for verdict in verdicts)
    bad = Counter(verdict.kind for verdict in verdicts if verdict.problems)
    width = max(map(len, kinds))
    lines = [f"{kind:{width}}  {kinds[kind]:5d}  {bad[kind] or '':>4}" for kind in sorted(kinds)]
    return "\n".join([f"{'kind':{width}}  {'count':>5}  {'bad':>4}", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument("--only", choices=SHARES, nargs="+", help="these kinds only")
    parser.add_argument("--job", type=int, help="this one of the jobs only, as failures name it")
    parser.add_argument("--plant", choices=[*PLANTS, "all"], help="plant a defect; all: see that each of them is found")
    parser.add_argument("--at-once", type=int, default=8, help="jobs that run at the same time; most of them wait")
    parser.add_argument("--no-links", action="store_true", help="do not cut links, which needs root")
    arguments = parser.parse_args()
    import_everything()
    jobs = planted(arguments.plant, plan(arguments.count, arguments.seed, arguments.only), arguments.seed)
    if arguments.plant == "all":
        return find_plants(jobs, arguments.at_once)
    started = time.monotonic()

    def show(number: int, verdict: Verdict) -> None:
        if verdict.problems or arguments.job is not None:
            print(f"job {number}: {verdict.kind}: {verdict.what}")
            print(*(f"  {category}: {text}" for category, text in verdict.problems), sep="\n", flush=True)

    if arguments.job is not None:
        verdicts = run([jobs[arguments.job]], 1, show)
    else:
        verdicts = run(jobs, arguments.at_once, show)
        if not arguments.no_links and arguments.only is None:
            for verdict in links.cut_some(arguments.seed):
                show(-1, verdict)
                verdicts.append(verdict)
    print(table(verdicts))
    apart = sum(verdict.apart for verdict in verdicts)
    cut = sum(verdict.kind.startswith("link") for verdict in verdicts)
    print(
        f"\n{len(verdicts) - cut} faults and {cut} cut links in {time.monotonic() - started:.0f} s, seed {arguments.seed}; "
        f"in {apart} of them DDP's own collectives failed first, before the first bucket"
    )
    counts = Counter(category for verdict in verdicts for category in {category for category, _ in verdict.problems})
    print(", ".join(f"{counts[category]} {category}" for category in CATEGORIES))
    return bool(counts)


if __name__ == "__main__":
    sys.exit(main())

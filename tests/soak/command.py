"""The command: a soak at each world size, a line for each hook, and what it all comes to."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from ranks import RankError, RankPool

from .gauges import KINDS, ends
from .plants import PLANTS
from .variants import variants
from .worker import Report, Settings, soak

SECONDS_A_STEP = 1.0
"""After so long, ranks are thought to hang; a step takes a few hundredths."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of all hooks and world sizes together")
    parser.add_argument("--hooks", type=lambda text: text.split(";"), help="titles or hooks, separated by ';'")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 3], help="world sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", choices=PLANTS, help="plant a defect first")
    options = parser.parse_args(arguments)
    settings = Settings(
        variants(options.hooks),
        steps=options.steps // len(options.world),
        seed=options.seed,
        plant=options.plant,
        loud=True,
    )
    pool, began, reports, problems = RankPool(max(options.world)), time.monotonic(), {}, []
    try:
        for world_size in options.world:
            try:
                reports[world_size] = run(pool, world_size, settings)
            except RankError as error:
                problems.append(f"{world_size} ranks: {error}")
    finally:
        pool.stop()
    for world_size, ranks in reports.items():
        problems += [problem for report in ranks for problem in report.problems]
        print(*(_held(world_size, rank, report) for rank, report in enumerate(ranks)), sep="\n")
    total = sum((counts for ranks in reports.values() for counts in ranks[0].counts.values()), Counter())
    total.pop("seconds", None)
    figures = ", ".join(f"{count} {kind}" for kind, count in total.items())
    print(f"seed {options.seed}: {figures}; {time.monotonic() - began:.0f} s; {len(problems)} problems")
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


def run(pool: RankPool, world_size: int, settings: Settings) -> list[Report]:
    """The reports by rank."""
    return pool.run(soak, world_size, settings, timeout=120 + SECONDS_A_STEP * settings.steps)


def _held(world_size: int, rank: int, report: Report) -> str:
    pairs = [(kind, *ends([getattr(sample, kind) for sample in report.samples])) for kind in KINDS]
    figures = ", ".join(f"{kind} {first:.1f} -> {last:.1f}" for kind, first, last in pairs)
    return f"{world_size} ranks, rank {rank}: {figures}"

"""What a fault may lead to, and what it must not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .server import PATIENCE, Outcome

HANG, SILENT, LOST, UNNAMED = (
    "hangs past the timeout",
    "silent differences",
    "lost whole checkpoints",
    "errors that are not named",
)
CATEGORIES = (HANG, SILENT, LOST, UNNAMED)


@dataclass
class Verdict:
    """On one fault."""

    kind: str
    what: str
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(category, what happened)"""
    apart: bool = False
    """DDP's own collective failed before the first bucket: not this package's to name."""

    def blame(self, category: str, text: str) -> None:
        self.problems.append((category, text))


def judge_survivors(verdict: Verdict, outcomes: list[Outcome], struck: set[int], *, must_name: bool) -> None:
    """Each one ends in time, with a named error; and, if ``must_name``, somebody's error names a struck rank."""
    struck_at = max((outcomes[rank].notes.get("struck", 0.0) for rank in struck), default=0.0)
    failed = []
    for rank, outcome in enumerate(outcomes):
        if rank in struck and outcome.ended != "failed":
            continue
        if outcome.ended == "hung":
            verdict.blame(HANG, f"rank {rank} did not end; {outcome.where}")
        elif outcome.ended == "killed":
            verdict.blame(UNNAMED, f"rank {rank} died without a word")
        elif outcome.ended == "failed":
            if struck_at and rank not in struck and outcome.at - struck_at > PATIENCE:
                verdict.blame(HANG, f"rank {rank} ended {outcome.at - struck_at:.1f} s after the fault")
            if not outcome.named and not (outcome.planted and rank in struck):
                if _is_before_the_first_bucket(outcome):
                    verdict.apart = True
                else:
                    verdict.blame(UNNAMED, f"rank {rank}: {outcome.where}")
            elif rank not in struck:
                failed.append((rank, outcome.error))
    if must_name and failed and not any(struck & named_ranks(text) for _, text in failed):
        verdict.blame(UNNAMED, f"nobody names rank {sorted(struck)}: {failed}")


def judge_equal(verdict: Verdict, outcomes: list[Outcome], reference: str | None = None) -> None:
    """All ranks have finished with the same weights, those of an undisturbed run if its ``reference`` is given."""
    digests = {outcome.value["weights"] for outcome in outcomes if outcome.ended == "finished"}
    if len(digests) > 1:
        verdict.blame(SILENT, "ranks finished with different weights")
    elif reference is not None and digests and digests != {reference}:
        verdict.blame(SILENT, "the weights are not those of an undisturbed run")


def judge_unfailed(verdict: Verdict, outcomes: list[Outcome]) -> None:
    """Nothing may fail."""
    for rank, outcome in enumerate(outcomes):
        if outcome.ended == "hung":
            verdict.blame(HANG, f"rank {rank} did not end; {outcome.where}")
        elif outcome.ended != "finished":
            verdict.blame(UNNAMED, f"rank {rank} failed, and should not have: {outcome.where}")


def judge_checkpoint(verdict: Verdict, outcomes: list[Outcome], loads: list[Outcome]) -> None:
    """Fresh ranks have loaded the newer save or the older one, whole and alike."""
    before = len(verdict.problems)
    judge_unfailed(verdict, loads)
    if len(verdict.problems) > before:
        return
    found = [load.value["found"][0] for load in loads]
    allowed = [[outcome.notes.get(save) for outcome in outcomes] for save in ("old", "new")]
    if None in found:
        verdict.blame(LOST, f"ranks found {found}; log: {loads[0].notes}")
    elif found not in allowed:
        verdict.blame(SILENT, f"ranks loaded {found}, and saved {allowed}")
    elif all(outcome.notes.get("saved") for outcome in outcomes) and found != allowed[1]:
        verdict.blame(LOST, "the newer save was complete, and the older one was loaded")
    judge_equal(verdict, loads)


def named_ranks(text: str) -> set[int]:
    """The ranks that an error says are missing, or differ: ``rank 2``, ``ranks 0, 1 and 3``."""
    text = text.split("still there")[0]
    lists = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text)
    return {int(number) for found in lists for number in re.findall(r"\d+", found)}


def _is_before_the_first_bucket(outcome: Outcome) -> bool:
    """DDP's constructor compares and broadcasts parameters, and init_process_group connects."""
    ours = any(f"accel_commhooks/{folder}/" in outcome.where for folder in ("comm", "attachment", "hooks"))
    return not ours and any(f"in {name}" in outcome.where for name in ("make_ddp", "init_process_group"))

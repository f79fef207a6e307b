"""One oracle for all cases."""

from __future__ import annotations

import torch
from models import distance

from .axes import CHANGING, EXACT, Case, refused
from .script import Record, run

TOLERANCE = 2e-5
"""Of an exact hook: some roundings of float32 a step, in weights of order one, over ten steps with momentum."""


def judge(pool, case: Case, plant: str | None = None) -> tuple[str, list[str]]:
    """Run a case; returns its outcome ('equal', 'trained' or 'refused') and what is wrong with it."""
    records = pool.run(run, 2, case, True, plant)
    refusals = [record.refusal for record in records]
    if any(refusals):
        if not all(refusals):
            return "refused", [f"some ranks were refused and others not: {refusals}"]
        return "refused", [] if refused(case) else [f"refused: {refusals[0]}"]
    problems = ["it should have been refused"] if refused(case) else []
    problems += [problem for record in records for problem in _alone(case, record)]
    problems += _together(records)
    # Gradients that are zeroed in place are not in a checkpoint: parameters that are not used next are stepped, or not.
    if case["event"] == "resume" and not (case["loop"] == "discards in place" and case["model"] in CHANGING):
        uninterrupted = pool.run(run, 2, {**case, "event": "save"}, True, plant)
        off = max(distance(mine.weights, other.weights) for mine, other in zip(records, uninterrupted, strict=True))
        if not off <= TOLERANCE:
            problems.append(f"resumed, it is {off:.1e} away from the run that was not interrupted")
    if case["hook"] not in EXACT:
        return "trained", problems
    plain = pool.run(run, 2, case, False)[0]
    off = distance(records[0].weights, plain.weights)
    if not off <= TOLERANCE:
        problems.append(f"{off:.1e} away from plain DDP")
    return "equal", problems


def _alone(case: Case, record: Record) -> list[str]:
    problems = list(record.feedback)
    if record.counted != record.expected:
        problems.append(f"{record.counted} steps counted, {record.expected} taken")
    if record.strays:
        problems.append(f"{record.strays} of the script's own collectives returned something else")
    if not record.load_kept:
        problems.append("something was added to weights that were loaded")
    if not all(bool(torch.isfinite(weight).all()) for weight in record.weights.values()):
        problems.append("weights are not finite")
    if record.sent == 0 and case["loop"] != "averaging by hand":
        problems.append("the hook sent nothing")
    return problems


def _together(records: list[Record]) -> list[str]:
    problems = []
    if distance(records[0].weights, records[1].weights) != 0:
        problems.append("ranks end with different weights")
    for step, ((equal, mine), (other_equal, theirs)) in enumerate(zip(records[0].sums, records[1].sums, strict=True)):
        if equal != other_equal:
            problems.append(f"step {step}: ranks disagree whether replicas are equal")
        elif equal and mine != theirs:
            problems.append(f"step {step}: weights differ, and are said to be equal")
    return problems

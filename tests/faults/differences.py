"""Ranks that are not alike: in what they are about to do, or in a bit of what they hold in common."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from models import Net, make_ddp, train, weights

from accel_commhooks import attach
from accel_commhooks.attachment import agreement, rank_files

from .oracle import SILENT, Verdict, judge_equal, judge_survivors, judge_unfailed
from .server import Note, run_ranks
from .subjects import STEPS, SUBJECTS, begin

DIFFERENCES = (
    "an option",
    "a period of checks",
    "the hook",
    "the optimizer",
    "a bucket size",
    "a bad option",
    "no hook",
)
OTHER_OPTION = {
    "powersgd": {"matrix_approximation_rank": 1},
    "batched_powersgd": {"matrix_approximation_rank": 1},
    "post_localsgd": {"period": 3},
    "zero_overlap": {"overlap": False},
    "allreduce": {"wire_dtype": "bf16"},
    "int8_compress": {"ranks_per_node": 1},
}
ALWAYS_SEEN = ("allreduce", "int8_compress", "powersgd", "batched_powersgd", "zero_overlap")
"""Hooks whose weights are the same on all ranks before every reduction."""


def differ(name: str, world: int, rank: int, how: str) -> list[Verdict]:
    """One rank differs at attach: every rank fails, and names it."""
    verdict = Verdict(f"ranks differ in {how}", f"{name}, {world} ranks: rank {rank} differs in {how}")
    outcomes = run_ranks(_attaching, world, name, rank, how)
    for each, outcome in enumerate(outcomes):
        if outcome.ended == "finished":
            verdict.blame(SILENT, f"rank {each} went on")
    judge_survivors(verdict, outcomes, set(), must_name=False)
    if not any(f"rank {rank}" in outcome.error or "ranks " in outcome.error for outcome in outcomes):
        verdict.blame(SILENT, f"nobody names rank {rank}: {[outcome.error for outcome in outcomes]}")
    return [verdict]


def _attaching(rank: int, world: int, note: Note, name: str, different: int, how: str) -> dict[str, str]:
    agreement.ABSENT_SECONDS = 2.0
    subject, odd = SUBJECTS[name], rank == different
    hook, options = subject.hook, {"check_every": 2, **subject.options}
    if odd and how == "an option":
        options.update(OTHER_OPTION[hook])
    elif odd and how == "a period of checks":
        options["check_every"] = 3
    elif odd and how == "the hook":
        hook, options = ("bf16_compress", {})
    elif odd and how == "a bad option":
        options["no_such_option"] = 1
    ddp = make_ddp(
        Net(16, subject.buffers),
        broadcast_buffers=False,
        bucket_cap_mb=0.008 if odd and how == "a bucket size" else 0.004,
    )
    kind = torch.optim.SGD if odd and how == "the optimizer" else torch.optim.Adam
    optimizer = kind(ddp.parameters(), lr=0.01)
    if odd and how == "no hook":
        time.sleep(1)  # the others have begun to attach
    else:
        attach(ddp, hook, optimizer=optimizer, **options)
    train(ddp, rank, STEPS, optimizer=optimizer)
    return {"weights": rank_files.digest_of(weights(ddp))}


def flip(name: str, world: int, rank: int, seed: int, repair: bool) -> list[Verdict]:
    """A bit changes on one rank: an error on all ranks, or replicas that are equal in the end."""
    way = "repaired" if repair else "told"
    verdict = Verdict(f"a flipped bit in memory, {way}", f"{name}, {world} ranks: rank {rank}, seed {seed}, {way}")
    outcomes = run_ranks(_flipping, world, name, rank, seed, repair)
    verdict.what += f", {outcomes[rank].notes.get('flipped')}"
    if "flipped" not in outcomes[rank].notes:
        verdict.blame(SILENT, f"no bit was flipped: {[outcome.error for outcome in outcomes]}")
    if repair:
        judge_unfailed(verdict, outcomes)
    else:
        judge_survivors(verdict, outcomes, set(), must_name=False)
    judge_equal(verdict, outcomes)
    seen = any("Disagreement" in outcome.error for outcome in outcomes) or any(
        "rank 0 has" in t for t in outcomes[0].log
    )
    if SUBJECTS[name].hook in ALWAYS_SEEN and not seen:
        verdict.blame(SILENT, "nobody noticed")
    return [verdict]


def _flipping(rank: int, world: int, note: Note, name: str, bad: int, seed: int, repair: bool) -> dict[str, str]:
    ddp, optimizer, handle = begin(SUBJECTS[name], check_every=1, on_disagreement="repair" if repair else "error")
    train(ddp, rank, STEPS, optimizer=optimizer)
    chance, flipped = random.Random(seed), []

    def on_step(step: int) -> None:
        kinds: dict[str, dict[str, Any]] = {kind: held for kind, held in handle.hook.common().items() if held}
        if flipped or not kinds:
            return
        kind = chance.choice(sorted(kinds))
        tensor_name = chance.choice(sorted(kinds[kind]))
        raw = kinds[kind][tensor_name].data.view(-1).view(torch.uint8)
        place, bit = chance.randrange(raw.numel()), chance.randrange(8)
        flipped.append(tensor_name)
        if rank == bad:
            raw[place] ^= 1 << bit
            note("flipped", f"{kind} of {tensor_name}, byte {place}, bit {bit}")

    train(ddp, rank, 3 * STEPS, optimizer=optimizer, first=STEPS, on_step=on_step)
    handle.synchronize()
    return {"weights": rank_files.digest_of(weights(ddp))}

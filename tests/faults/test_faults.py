"""The fault suite: a small part of it with every test run, and defects that it must find.

It runs in a process of its own: it forks, and pytest has threads.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .files import DAMAGES
from .oracle import named_ranks
from .plan import SHARES, plan
from .plants import PLANTS


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "faults", "--no-links", "--at-once", "8", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=240)


def test_a_small_part_of_every_kind():
    done = _run("--count", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "0 hangs past the timeout, 0 silent differences, 0 lost whole checkpoints, 0 errors that are not named"
        in done.stdout
    )


def test_planted_defects_are_found():
    done = _run("--plant", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{plant}: " in done.stdout and f"{plant}: 0" not in done.stdout for plant in PLANTS)


def test_a_planted_defect_fails_the_suite():
    done = _run("--plant", "raw-errors", "--only", "kill", "--count", "2")
    assert done.returncode == 1 and "errors that are not named: rank" in done.stdout, done.stdout + done.stderr


def test_a_seed_always_gives_the_same_faults():
    assert plan(200, 5) == plan(200, 5) != plan(200, 6)


def test_a_thousand_faults_are_of_all_kinds():
    jobs = plan(1000, 0)
    assert sum(job.faults for job in jobs) >= 1000
    assert {job.family for job in jobs} == set(SHARES)
    assert {kind for job in jobs if job.family == "file" for kind, _ in job.arguments[2]} == set(DAMAGES)


def test_ranks_that_an_error_names():
    assert named_ranks("rank 2: no answer within 3 s; still there: ranks 0 and 1") == {2}
    assert named_ranks("ranks 0, 1 and 3: no answer") == {0, 1, 3}
    assert named_ranks("all ranks of this group are alive") == set()

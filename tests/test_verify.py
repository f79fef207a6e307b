"""verify: it passes here, by itself and under the launcher, and fails on planted defects without hanging."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import accelerate_launch

from accel_commhooks import available_hooks, get_hook
from accel_commhooks.cli.main import main
from accel_commhooks.verify.case import FAIL, NOT_APPLICABLE, NOT_RUN, PASS, digest
from accel_commhooks.verify.checks import CHECKS, combine
from accel_commhooks.verify.measures import hidden_share
from accel_commhooks.verify.run import verify

TESTS = Path(__file__).parent


def _run(tmp_path, *words, timeout=200):
    """The command by itself, with the tests' own hooks importable: exit code, what it printed, its report."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "accel_commhooks.cli", "verify", "--output", str(tmp_path / "verify.json"), *words]
    started = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )
    print(f"{time.monotonic() - started:.0f} s\n{done.stdout}")
    report = tmp_path / "verify.json"
    return done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else None


def _statuses(report, hook):
    return {check: result["status"] for check, result in report["hooks"][hook].items()}


# It passes.


def test_all_hooks_pass_by_themselves_in_time(tmp_path):
    code, printed, report = _run(tmp_path)
    assert code == 0 and report["passed"], printed
    assert report["seconds"] < 120
    ours = [hook for hook in available_hooks() if get_hook(hook).__module__.startswith("accel_commhooks.")]
    assert set(report["hooks"]) == set(ours)
    for hook in ours:
        statuses = _statuses(report, hook)
        assert set(statuses) == set(CHECKS) and FAIL not in statuses.values() and NOT_RUN not in statuses.values()
        assert statuses["resume"] == statuses["overflow"] == statuses["host_reads"] == statuses["bytes"] == PASS
    for hook, check in (("allreduce", "equals_ddp"), ("zero_overlap", "equals_ddp"), ("powersgd", "feedback")):
        assert _statuses(report, hook)[check] == PASS
    count = sum(status != NOT_APPLICABLE for hook in report["hooks"] for status in _statuses(report, hook).values())
    assert f"{count} of {count} checks passed" in printed
    assert {"torch", "accelerate", "python", "accel-commhooks"} <= report["versions"].keys()
    assert report["link"]["mb_per_s"] > 0 and report["ranks_per_node"] == [2] and len(report["machines"]) == 2
    assert report["hooks"]["powersgd"]["host_reads"]["path"] == "the accelerator's, forced on a CPU"


@pytest.mark.slow
def test_under_accelerate_launch(tmp_path):
    words = ["-m", "accel_commhooks.verify", "--hooks", "allreduce,powersgd", "--output", tmp_path / "verify.json"]
    result = accelerate_launch(words, tmp_path).check()
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["passed"] and report["running"] is None
    assert _statuses(report, "powersgd")["feedback"] == PASS
    assert "checks passed" in result.output


def _verify(rank, world_size, hooks, checks=None):
    report = verify(hooks, "cpu", checks=checks)
    return report.to_dict(), report.text(), report.failures


def test_a_hook_of_somebody_else_is_checked_like_ours(pool):
    by_rank = pool.run(_verify, 2, ["verify_hooks:HalfHook"])
    report, text, failures = by_rank[0]
    assert report["passed"] and not failures, text
    assert [other["hooks"].keys() for other, *_ in by_rank] == [report["hooks"].keys()] * 2
    statuses = _statuses(report, "verify_hooks:HalfHook")
    assert statuses.pop("equals_ddp") == statuses.pop("overlap") == NOT_APPLICABLE
    assert statuses.pop("kernels") == "measured"
    assert set(statuses.values()) == {PASS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook",
    [
        "post_localsgd{period: 3, overlap_steps: 1}",
        "powersgd{wire_dtype: int8}",
        "powersgd{alternate: true, wire_dtype: bf16}",
    ],
)
def test_options_and_three_ranks(pool, hook):
    report, text, _ = pool.run(_verify, 3, [hook])[0]
    assert report["passed"], text


# It fails on planted defects.

PLANTED = {
    "WrongMean": ("equals_ddp", "weights must be plain DDP's"),
    "LostResidual": ("feedback", "a part of the gradients is lost"),
    "LocalFuture": ("consensus", "equal to the bit"),
    "ReadsHost": ("host_reads", "_local_scalar_dense"),
    "ForgetsState": ("resume", "a resumed run must end with the same weights"),
    "StepsOnOverflow": ("overflow", "must make every rank skip"),
    "SendsTwice": ("bytes", "what the hook's formula predicts"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_fails_its_check_on_all_ranks(pool, name):
    check, words = PLANTED[name]
    for report, text, failures in pool.run(_verify, 2, [f"verify_hooks:{name}"], [check]):
        assert _statuses(report, f"verify_hooks:{name}")[check] == FAIL, text
        assert not report["passed"] and any(f"{check}: " in line and words in line for line in failures), failures


def test_a_failure_ends_the_command_with_code_one(tmp_path):
    code, printed, report = _run(tmp_path, "--hooks", "verify_hooks:WrongMean", "--checks", "equals_ddp,consensus")
    assert code == 1 and not report["passed"]
    assert "FAIL  verify_hooks:WrongMean, equals_ddp: weights must be plain DDP's" in printed


HANGING = {
    "NoFuture": ["consensus of verify_hooks:NoFuture", "did not end within"],
    "SkipsCollective": ["verify_hooks:SkipsCollective, consensus"],
    "RaisesOnOneRank": ["verify_hooks:RaisesOnOneRank, consensus", "planted"],
    "Dies": ["verify_hooks:Dies, consensus", "rank 1 died of signal 9"],
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", HANGING)
def test_ranks_out_of_step_do_not_hang_the_command(tmp_path, name):
    """The check is named, the rest is not run, and the command ends soon after the timeout."""
    words = ["--hooks", f"verify_hooks:{name}", "--checks", "consensus,resume", "--timeout", "5"]
    started = time.monotonic()
    code, printed, report = _run(tmp_path, *words, timeout=120)
    assert code == 1, printed
    assert time.monotonic() - started < 75
    for text in HANGING[name]:
        assert text in printed, printed
    assert report["stopped"] and not report["passed"]
    assert _statuses(report, f"verify_hooks:{name}") == {"consensus": FAIL, "resume": NOT_RUN}


# What is accepted, and parts.


def test_the_checks_are_listed(capsys):
    assert main(["verify", "--list"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == list(CHECKS)
    assert all(len(line.split()) > 5 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hooks", "powersdg"], "there is no hook named 'powersdg'; did you mean 'powersgd'?"),
        (["--hooks", "powersgd{rank: 4}"], "has no option 'rank'"),
        (["--checks", "resum"], "there is no check named 'resum'; did you mean 'resume'?"),
        (["--hooks", "allreduce,allreduce"], "every hook may be named once, but got allreduce twice"),
        (["--timeout", "0"], "--timeout must be above 0 seconds, but got 0"),
        (["--ranks", "1"], "--ranks must be at least 2, but got 1"),
    ],
)
def test_mistakes_are_explained_before_a_rank_starts(capsys, monkeypatch, words, text):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a rank was started"))
    assert main(["verify", *words]) == 2
    assert text in capsys.readouterr().err


def _answer(status=PASS, text="", error=None, **figures):
    return {"status": status, "text": text, "error": error, "figures": figures}


def test_a_failure_anywhere_is_a_failure_and_the_cause_is_shown():
    outcome, stop = combine([_answer(FAIL, "lost it", "lost"), _answer(FAIL, "broke", "raised")])
    assert (outcome.status, outcome.text) == (FAIL, "broke") and "out of step" in stop
    outcome, stop = combine([_answer(), _answer(FAIL, "wrong")])
    assert outcome.text == "on rank 1: wrong" and stop is None
    outcome, stop = combine([_answer(FAIL, "broke", "raised")] * 2)
    assert outcome.status == FAIL and stop is None, "all ranks raised, so they are still in step"
    assert combine([_answer(), _answer(NOT_APPLICABLE)])[0].status == FAIL


def test_the_share_of_communication_that_is_hidden():
    assert hidden_share([(0, 10)], [(0, 10)]) == 1
    assert hidden_share([(0, 10)], [(20, 30)]) == 0
    assert hidden_share([(0, 10), (5, 20)], [(0, 5), (4, 8), (15, 40)]) == pytest.approx(13 / 20)


def test_a_digest_sees_every_bit():
    one = {"a": torch.tensor([1.0, -0.0])}
    assert digest(one) == digest({"a": torch.tensor([1.0, -0.0])})
    assert digest(one) != digest({"a": torch.tensor([1.0, 0.0])})

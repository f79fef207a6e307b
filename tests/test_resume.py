"""Killed and resumed equals uninterrupted, through Trainer and through Accelerate, with real checkpoints and real kills."""

import shutil

import pytest
import torch
from launching import SCRIPTS, accelerate_launch, hook_config
from models import distance

pytestmark = pytest.mark.slow

HOOKS = {
    "powersgd": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    "post_localsgd": {"start_localSGD_iter": 2, "period": 5, "subgroup": "none"},
    "zero_overlap": {},
}
SCRIPTS_BY_NAME = {"accelerate": "accelerate_loop.py", "trainer": "trainer_loop.py"}


def _floats(state):
    return {name: value for name, value in state.items() if value.is_floating_point()}


def _launch(tmp_path, folder, script, hook, *flags, processes=2):
    out = tmp_path / folder
    file = hook_config(tmp_path, hook, **HOOKS[hook])
    arguments = [
        "-m",
        "accel_commhooks",
        file,
        SCRIPTS / SCRIPTS_BY_NAME[script],
        "--out",
        out,
        "--save_at",
        "6",
        *flags,
    ]
    return accelerate_launch(arguments, out, config={"num_processes": processes})


def _hook_state(out, script):
    return out / ("checkpoint" if script == "accelerate" else "checkpoint-6") / "comm_hook"


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("script", SCRIPTS_BY_NAME)
def test_killed_and_resumed_is_uninterrupted(tmp_path, hook, script):
    whole = _launch(tmp_path, "whole", script, hook).check().finals()
    killed = _launch(tmp_path, "cut", script, hook, "--kill_at", "9")
    assert killed.code != 0 and not killed.finals()
    state = torch.load(_hook_state(tmp_path / "cut", script) / "rank_00001.pt", weights_only=True)
    assert state["hook"] == hook and state["state"]["step"] == 6
    if hook == "powersgd":
        shutil.copytree(tmp_path / "cut", tmp_path / "dropped")
        shutil.rmtree(_hook_state(tmp_path / "dropped", script))
    resumed = _launch(tmp_path, "cut", script, hook, "--resume").check()
    assert "starts anew" not in resumed.output
    for uninterrupted, final in zip(whole, resumed.finals(), strict=True):
        assert distance(_floats(uninterrupted), _floats(final)) <= 1e-6
    if hook == "powersgd":
        dropped = _launch(tmp_path, "dropped", script, hook, "--resume").check()
        assert "starts anew" in dropped.output and "made without a hook" in dropped.output
        assert distance(_floats(whole[0]), _floats(dropped.finals()[0])) > 1e-5


@pytest.mark.parametrize("script", SCRIPTS_BY_NAME)
def test_resume_at_another_world_size(tmp_path, script):
    _launch(tmp_path, "cut", script, "powersgd", "--kill_at", "9")
    resumed = _launch(tmp_path, "cut", script, "powersgd", "--resume", processes=3).check()
    finals = resumed.finals()
    assert len(finals) == 3
    assert distance(_floats(finals[0]), _floats(finals[2])) == 0 or script == "accelerate"


def test_resume_with_another_hook_says_so_and_goes_on(tmp_path):
    _launch(tmp_path, "cut", "trainer", "powersgd", "--kill_at", "9")
    resumed = _launch(tmp_path, "cut", "trainer", "zero_overlap", "--resume").check()
    assert "it holds the state of 'powersgd'" in resumed.output

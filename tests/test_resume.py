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
    """Without a hook, plain DDP: nothing of ours is on the command line."""
    out = tmp_path / folder
    ours = ["-m", "accel_commhooks", hook_config(tmp_path, hook, **HOOKS[hook])] if hook else []
    arguments = [*ours, SCRIPTS / SCRIPTS_BY_NAME[script], "--out", out, "--save_at", "6", *flags]
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
    assert "starts afresh" not in resumed.output
    for uninterrupted, final in zip(whole, resumed.finals(), strict=True):
        assert distance(_floats(uninterrupted), _floats(final)) <= 1e-6
    if hook == "powersgd":
        dropped = _launch(tmp_path, "dropped", script, hook, "--resume").check()
        assert "starts afresh" in dropped.output and "made without a hook" in dropped.output
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


# ZeRO's checkpoints are ordinary: every way through them ends where plain DDP ends that nothing interrupted.

GLOBAL_BATCH = ("--global_batch", "12")


@pytest.fixture(scope="module", params=SCRIPTS_BY_NAME)
def runs(request, tmp_path_factory):
    """(script, folder, final weights of plain DDP); in the folder, runs killed after a save: "zero" and "ddp"."""
    script, folder = request.param, tmp_path_factory.mktemp(request.param)
    whole = _launch(folder, "whole", script, None, *GLOBAL_BATCH).check()
    assert whole.probe() == [[], []]
    for name, hook in (("zero", "zero_overlap"), ("ddp", None)):
        killed = _launch(folder, name, script, hook, "--kill_at", "9", *GLOBAL_BATCH)
        assert killed.code != 0 and not killed.finals()
        assert _hook_state(folder / name, script).exists() == (name == "zero")
    return script, folder, whole.finals()[0]


@pytest.mark.parametrize(
    ("first", "second", "processes"),
    [("zero", "ddp", 2), ("ddp", "zero", 2), ("zero", "zero", 3)],
    ids=["zero_to_ddp", "ddp_to_zero", "2_to_3_ranks"],
)
def test_zero_and_ddp_resume_each_other(runs, tmp_path, first, second, processes):
    script, folder, whole = runs
    shutil.copytree(folder / first, tmp_path / "cut")
    hook = "zero_overlap" if second == "zero" else None
    resumed = _launch(tmp_path, "cut", script, hook, "--resume", *GLOBAL_BATCH, processes=processes).check()
    attached = [[(row["hook"], row["steps"]) for row in rows] for rows in resumed.probe()]
    # Plain DDP left no count of steps.
    assert attached == [[("zero_overlap", 12 if first == "zero" else 6)] if hook else []] * processes
    finals = resumed.finals()
    assert len(finals) == processes
    for final in finals:
        # Clipped gradients are about 0.1, so they differ by 1e-8, rounding; times the rate, 5e-3, and divided by epsilon,
        # 1e-3, that is 5e-8 a step.
        assert distance(whole, final) <= 1e-6

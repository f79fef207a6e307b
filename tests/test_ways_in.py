"""The four ways in, through the real launcher on two ranks, with scripts that were not changed."""

import json

import pytest
import torch
import yaml
from launching import ACCELERATE_CONFIG, BIN, SCRIPTS, accelerate_launch, free_port, hook_config, run
from models import distance

HOOK = {"name": "powersgd", "matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _check_acted(result, steps, hook="powersgd"):
    result.check()
    first, second = result.finals()
    assert distance(_floats(first), _floats(second)) == 0
    reports = result.probe()
    assert len(reports) == 2
    for rows in reports:
        assert [row["hook"] for row in rows] == [hook]
        assert rows[0]["steps"] == steps
        assert 0 < rows[0]["sent"] < 0.6 * rows[0]["plain"]


def _floats(state):
    return {name: value for name, value in state.items() if value.is_floating_point() and "running" not in name}


@pytest.mark.parametrize("script", ["accelerate_loop.py", "trainer_loop.py"])
def test_module_launch_with_an_unchanged_script(tmp_path, script):
    file = hook_config(tmp_path, **HOOK)
    arguments = ["-m", "accel_commhooks", file, SCRIPTS / script, "--out", tmp_path]
    _check_acted(accelerate_launch(arguments, tmp_path), 12)
    if "trainer" in script:
        logs = torch.load(tmp_path / "log_0.pt", weights_only=False)
        assert all("comm_mb_within_node" in row and "comm_wait_s" in row for row in logs if "loss" in row)


@pytest.mark.parametrize("script", ["accelerate_loop.py", "trainer_loop.py"])
def test_our_launch_with_one_file(tmp_path, script):
    file = tmp_path / "one_file.yaml"
    file.write_text(yaml.safe_dump({**ACCELERATE_CONFIG, "comm_hook": HOOK}))
    launcher = [BIN / "accel-commhooks", "launch", "--config_file", file, "--main_process_port", free_port()]
    _check_acted(run([*launcher, SCRIPTS / script, "--out", tmp_path], tmp_path), 12)


def test_kwargs(tmp_path):
    file = hook_config(tmp_path, **HOOK)
    arguments = [SCRIPTS / "accelerate_with_kwargs.py", "--out", tmp_path]
    _check_acted(accelerate_launch(arguments, tmp_path, ACCELERATE_COMM_HOOK=str(file)), 12)


def test_callback(tmp_path):
    file = hook_config(tmp_path, **HOOK)
    arguments = [SCRIPTS / "trainer_with_callback.py", "--out", tmp_path]
    _check_acted(accelerate_launch(arguments, tmp_path, ACCELERATE_COMM_HOOK=str(file)), 12)


def test_ddp_by_hand_runs_as_without_us(tmp_path):
    file = hook_config(tmp_path, **HOOK)
    script = SCRIPTS / "ddp_by_hand.py"
    result = accelerate_launch(["-m", "accel_commhooks", file, script, "--out", tmp_path, "--x=1"], tmp_path)
    _check_acted(result, 4)
    seen = json.loads((tmp_path / "seen_0.json").read_text())
    assert seen == {
        "argv": [str(script), "--out", str(tmp_path), "--x=1"],
        "name": "__main__",
        "file": str(script),
        "main": True,
        "neighbour": "imported from beside the script",
        "path0": str(SCRIPTS),
    }


def test_a_failing_script_shows_its_own_traceback(tmp_path):
    file = hook_config(tmp_path, "bf16_compress")
    arguments = ["-m", "accel_commhooks", file, SCRIPTS / "ddp_by_hand.py", "--out", tmp_path, "--fail"]
    result = accelerate_launch(arguments, tmp_path)
    assert result.code == 1
    assert "RuntimeError: the script's own error" in result.output
    assert f'File "{SCRIPTS / "ddp_by_hand.py"}", line' in result.output


def test_exit_codes_come_through(tmp_path):
    file = hook_config(tmp_path, "bf16_compress")
    arguments = ["-m", "accel_commhooks", file, SCRIPTS / "ddp_by_hand.py", "--out", tmp_path, "--exit"]
    result = accelerate_launch(arguments, tmp_path)
    assert result.code != 0
    assert "exitcode  : 7" in result.output


# The launcher ends all ranks as soon as the first one has failed, whichever it is.
@pytest.mark.parametrize(("way", "late"), [("launched", "0"), ("launched", "1"), ("callback", "0")])
def test_a_mistake_in_the_config_is_one_message(tmp_path, way, late):
    file = hook_config(tmp_path, "powersgd", matrix_aproximation_rank=2)
    if way == "launched":
        arguments = ["-m", "accel_commhooks", file, SCRIPTS / "ddp_by_hand.py", "--out", tmp_path]
    else:
        arguments = [SCRIPTS / "trainer_with_callback.py", "--out", tmp_path]
    result = accelerate_launch(arguments, tmp_path, ACCELERATE_COMM_HOOK=str(file), PROBE_LATE_RANK=late)
    assert result.code != 0
    assert result.output.count("did you mean 'matrix_approximation_rank'?") == 1


def test_a_mistake_on_one_rank_alone_is_shown_by_that_rank(tmp_path):
    script = tmp_path / "one_rank.py"
    script.write_text(
        "import os, time\n"
        "from accel_commhooks import CommHookConfig\n"
        "CommHookConfig.load('powersgd' if os.environ['RANK'] == '0' else 'powersdg')\n"
        "time.sleep(100)\n"
    )
    result = accelerate_launch([script], tmp_path)
    assert result.code != 0
    assert result.output.count("did you mean 'powersgd'?") == 1


def test_a_single_process_runs_with_one_warning(tmp_path):
    import os
    import sys

    command = [sys.executable, "-m", "accel_commhooks", "powersgd", SCRIPTS / "accelerate_loop.py", "--out", tmp_path]
    result = run(command, tmp_path, RANK="0" if "RANK" in os.environ else "", ACCELERATE_USE_CPU="true").check()
    assert result.output.count("does nothing in a single process") == 1
    assert len(result.finals()) == 1

"""The command line: what it prints and how it ends."""

import pytest
import yaml

from accel_commhooks import available_hooks
from accel_commhooks.cli.main import main


def test_list_names_every_hook(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{printed}" for name in available_hooks())


@pytest.mark.parametrize("name", ["powersgd", "post_localsgd", "zero_overlap", "torch:powerSGD_hook"])
def test_show_prints_yaml_that_the_loader_takes(capsys, name):
    from accel_commhooks import CommHookConfig

    assert main(["show", name]) == 0
    printed = capsys.readouterr().out
    mapping = yaml.safe_load(printed[printed.index("comm_hook:") :])
    assert CommHookConfig.from_dict(mapping).name == name


def test_check_fills_in_defaults(capsys, tmp_path):
    file = tmp_path / "hook.yaml"
    file.write_text("comm_hook: {name: powersgd, alternate: true}")
    assert main(["check", str(file)]) == 0
    mapping = yaml.safe_load(capsys.readouterr().out)["comm_hook"]
    assert mapping["alternate"] is True and mapping["matrix_approximation_rank"] == 4


def test_a_mistake_is_one_message_and_code_two(capsys):
    assert main(["show", "powersdg"]) == 2
    assert capsys.readouterr().err.startswith(
        "accel-commhooks: there is no hook named 'powersdg'; did you mean 'powersgd'?"
    )


def test_launch_without_a_hook_says_where_to_name_one(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_COMM_HOOK", raising=False)
    file = tmp_path / "accelerate.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\n")
    assert main(["launch", "--config_file", str(file), "train.py"]) == 2
    assert "has no 'comm_hook' section and ACCELERATE_COMM_HOOK is not set" in capsys.readouterr().err


def test_nothing_asked_prints_help(capsys):
    assert main([]) == 1
    assert "COMMAND" in capsys.readouterr().out

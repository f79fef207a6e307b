"""The command line: what it prints and how it ends."""

import sys

import pytest
import yaml

from accel_commhooks import available_hooks
from accel_commhooks.cli.main import main
from accel_commhooks.config import registry


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
    assert mapping["alternate"] is True and mapping["matrix_approximation_rank"] == 15


FOREIGN = """\
comm_hook:
  name: runs_code:Hook
  state: runs_code:factory
  ranks_per_node: 2
  strength: 3
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A module that leaves a trace when it is imported, and is also an installed plugin."""
    (tmp_path / "runs_code.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\ndef Hook(state, bucket): ...\n")
    (tmp_path / "runs_code-0.1.dist-info").mkdir()
    (tmp_path / "runs_code-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: runs-code\nVersion: 0.1\n"
    )
    (tmp_path / "runs_code-0.1.dist-info" / "entry_points.txt").write_text(
        "[accel_commhooks.hooks]\nplug = runs_code\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_plugins_found", False)
    monkeypatch.setattr(registry, "_failed_plugins", {})
    yield tmp_path
    sys.modules.pop("runs_code", None)


def _check(folder, content, *flags):
    (folder / "hook.yaml").write_text(content)
    return main(["check", *flags, str(folder / "hook.yaml")])


def test_check_without_imports_runs_no_foreign_code(foreign, capsys):
    assert _check(foreign, FOREIGN, "--no-import") == 0
    printed = capsys.readouterr().out
    assert (
        "# 'runs_code:Hook' was not checked: it was not imported; of its options only those that every such" in printed
    )
    mapping = yaml.safe_load(printed)["comm_hook"]
    written = yaml.safe_load(FOREIGN)["comm_hook"]
    assert {name: mapping[name] for name in written} == written and mapping["state_options"] == {}
    assert _check(foreign, "comm_hook: {name: of_the_plugin, strength: 3}", "--no-import") == 0
    assert (
        "it is no hook of this package, and 'plug' of runs-code (runs_code) was not imported" in capsys.readouterr().out
    )
    assert _check(foreign, "comm_hook: {name: powersgd}", "--no-import") == 0
    assert "matrix_approximation_rank: 15" in capsys.readouterr().out
    assert _check(foreign, "comm_hook: {name: 'torch:allreduce_hook'}", "--no-import") == 0
    assert "not checked" not in capsys.readouterr().out
    assert not (foreign / "trace").exists() and "runs_code" not in sys.modules


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{name: 'runs_code:'}", "a function is named 'package.module:function', but got 'runs_code:'"),
        ("{name: 'runs_code:Hook', ranks_per_node: 0}", "ranks_per_node must be at least 1, but got 0"),
        ("{name: 'runs_code:Hook', state: factory}", "'package.module:function', but got 'factory'"),
        ("{name: 'runs_code:Hook', strength: [.inf]}", "strength[0] must be a finite number, but got inf"),
        ("{name: of_the_plugin, ranks_per_node: two}", "ranks_per_node must be a whole number, but got 'two'"),
        ("{name: powersgd, strength: 3}", "hook 'powersgd' has no option 'strength'"),
        ("{name: powersgd, name: 'runs_code:Hook'}", "line 1: the key 'name'"),
        ("3", "must be a mapping or a hook's name, but got 3"),
    ],
)
def test_check_without_imports_finds_what_it_can(foreign, capsys, section, words):
    assert _check(foreign, f"comm_hook: {section}", "--no-import") == 2
    assert words in capsys.readouterr().err
    assert not (foreign / "trace").exists()


def test_check_with_imports_is_the_default_and_afterwards_again(foreign, capsys):
    assert _check(foreign, FOREIGN, "--no-import") == 0
    assert not (foreign / "trace").exists()
    assert _check(foreign, FOREIGN) == 2
    assert "hook 'runs_code:Hook' has no option 'strength'" in capsys.readouterr().err
    assert (foreign / "trace").exists()


def test_check_without_imports_and_without_plugins_knows_all_names(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugins_found", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert _check(tmp_path, "comm_hook: powersdg", "--no-import") == 2
    assert "there is no hook named 'powersdg'; did you mean 'powersgd'?" in capsys.readouterr().err


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

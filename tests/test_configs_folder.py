"""Every file in configs/ loads, is explained option by option, and covers every hook of the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from accel_commhooks import CommHookConfig, available_hooks, get_hook
from accel_commhooks.config.config import read_mapping
from accel_commhooks.config.options import HookOptions

ROOT = Path(__file__).resolve().parent.parent
HOOK_FILES = sorted((ROOT / "configs").glob("*.yaml"))
ACCELERATE_FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
COMBINED = [file for file in ACCELERATE_FILES if "comm_hook" in yaml.safe_load(file.read_text())]
PYTHON_ONLY = {"averager"}


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch):
    """configs/custom_hook.yaml names a class in examples/."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])


@pytest.mark.parametrize("file", HOOK_FILES, ids=lambda file: file.stem)
def test_hook_file_loads(file):
    config = CommHookConfig.load(file)
    assert CommHookConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("file", HOOK_FILES, ids=lambda file: file.stem)
def test_every_option_is_explained_where_it_stands(file):
    """A comment stands above each option, or above the group of lines it belongs to."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# "), "the file's first line says what it is for"
    explained = False
    for line in lines[lines.index("comm_hook:") + 1 :]:
        if line.lstrip().startswith("#"):
            explained = True
        elif re.match(r"  name: ", line):
            explained = False
        else:
            assert explained, f"no comment above {line!r}"


@pytest.mark.parametrize("name", [name for name in available_hooks() if get_hook(name).__module__.startswith("accel_")])
def test_every_hook_has_a_file_with_all_its_options(name):
    written = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["comm_hook"]
    options = {option for option, *_ in get_hook(name).Options.describe()} - PYTHON_ONLY
    if name.startswith("batched_"):
        options &= set(written)  # its options are those of powersgd.yaml
    missing = options - set(HookOptions.__dataclass_fields__) - set(written)
    assert not missing, f"configs/{name}.yaml does not mention {sorted(missing)}"


@pytest.mark.parametrize("file", ACCELERATE_FILES, ids=lambda file: file.stem)
def test_accelerate_loads_its_files(file, tmp_path):
    mapping = read_mapping(file)
    if file in COMBINED:
        assert CommHookConfig.load(file).name in available_hooks()
        del mapping["comm_hook"]
        file = tmp_path / file.name
        file.write_text(yaml.safe_dump(mapping))
    config = load_config_from_file(str(file))
    assert config.num_processes == mapping["num_processes"]
    assert config.num_processes % config.num_machines == 0


def test_accelerate_alone_refuses_the_combined_file():
    """Which is why there is a launcher of our own."""
    assert len(COMBINED) == 1
    with pytest.raises(ValueError, match="comm_hook"):
        load_config_from_file(str(COMBINED[0]))

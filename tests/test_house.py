"""The architecture: rooms, who may know whom, and that these rules can fail."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "accel_commhooks"
MODULES = sorted(PACKAGE.rglob("*.py"))
ENTRY_POINTS = {"__init__", "__main__", "trainer"}
LONGEST = 300
IMPORTS = ("lint-imports", "--no-cache")
RUFF = ("ruff", "check", "--no-cache", "--select", "TID251,SLF001", "accel_commhooks")


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _house(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "accel_commhooks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _run(house: Path, *command: str) -> tuple[int, str]:
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [tool, *command[1:]], cwd=house, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(house)}
    )
    return done.returncode, done.stdout + done.stderr


def test_only_entry_points_lie_at_the_top():
    assert {file.stem for file in PACKAGE.glob("*.py")} == ENTRY_POINTS


@pytest.mark.parametrize("folder", sorted({file.parent for file in MODULES}), ids=_name)
def test_every_room_says_what_lives_there(folder):
    documentation = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert documentation and (folder == PACKAGE or "\n" not in documentation)


def test_no_module_is_too_long_for_one_concept():
    too_long = {_name(file): len(file.read_text().splitlines()) for file in MODULES}
    assert {file: lines for file, lines in too_long.items() if lines > LONGEST} == {}


def test_private_names_of_others_are_not_asked_for_by_text():
    """Ruff sees ``tensor._version``; this sees ``getattr(module, "_orig_mod")``."""
    asked = re.compile(r'(?:getattr|hasattr|setattr)\([^)]*"_[a-z]|"_[a-z_]+\."')
    guilty = [_name(f) for f in MODULES if asked.search(f.read_text()) and f.parent.name != "upstream"]
    assert guilty == []
    assert asked.search((PACKAGE / "upstream" / "seams.py").read_text()), "this test can see such names"


# CONTRIBUTING's map.

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
IN_WORDS = {"and one file per subcommand", "and one folder per method"}


def _map() -> dict[str, set[str]]:
    """Folder to the modules that the map lists in it."""
    block = re.search(r"^accel_commhooks/\n(.*?)^```", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]
    joined = re.sub(r"\n {15,}", " ", block)
    listed, parents = {}, {}
    for indent, folder, text in re.findall(r"^( +)(\w+)/ +(.*)$", joined, re.MULTILINE):
        parents[len(indent)] = folder
        path = folder if len(indent) == 2 else f"{parents[2]}/{folder}"
        names = re.sub(r" \(.*?\)", "", text.split(": ")[-1])
        listed[path] = {name.strip() for name in names.split(",")} - IN_WORDS
    return listed


def test_the_map_matches_the_tree():
    listed = _map()
    folders = {str(file.parent.relative_to(PACKAGE)) for file in MODULES} - {"."}
    assert set(listed) == folders
    for folder, names in listed.items():
        modules = {file.stem for file in (PACKAGE / folder).glob("*.py")} - {"__init__", "__main__"}
        assert names == ({"main"} if folder == "cli" else modules), folder


def test_five_questions_have_one_path_each():
    answers = re.findall(r"^\| (?!\|)(.+?) \|.*`(accel_commhooks/[\w/]+\.py)` \|$", CONTRIBUTING, re.MULTILINE)
    assert len(answers) == 5
    assert all((ROOT / path).is_file() for _, path in answers)


# Planted violations: each rule is kept by the house as it is, and broken by one line.

PLANTED = {
    "a hook that knows who attaches it": ("hooks/plain.py", "from ..attachment.handle import attach", "BROKEN"),
    "a collective that knows hooks": ("comm/hierarchy.py", "from ..hooks.base import CommHook", "BROKEN"),
    "anybody who knows bench": ("ways_in/install.py", "from ..bench.report import rows", "BROKEN"),
    "a method that knows another": ("hooks/zero/hook.py", "from ..powersgd.lowrank import rank_for", "BROKEN"),
    "an attachment that names a method": ("attachment/step.py", "from ..hooks.zero.hook import ZeroOverlapHook", "BROKEN"),
    "a room that is not in the contract": ("attic/__init__.py", '"""Things."""', "BROKEN"),
    "a hook that calls torch.distributed": ("hooks/plain.py", "import torch.distributed", "TID251"),
    "a hook that knows DDP": ("hooks/base.py", "from torch.nn.parallel import DistributedDataParallel", "TID251"),
    "a way in that watches steps": (
        "ways_in/install.py",
        "from torch.optim.optimizer import register_optimizer_step_pre_hook",
        "TID251",
    ),
    "private ground": ("hooks/base.py", "VERSION = torch.ones(())._version", "SLF001"),
}  # fmt: skip


def test_the_house_keeps_its_rules(tmp_path):
    house = _house(tmp_path)
    for command in (IMPORTS, RUFF):
        code, printed = _run(house, *command)
        assert code == 0, printed


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_caught(tmp_path, case):
    file, line, caught_by = PLANTED[case]
    house = _house(tmp_path)
    target = house / "accel_commhooks" / file
    target.parent.mkdir(exist_ok=True)
    text = target.read_text() if target.exists() else ""
    target.write_text(f"{text}\n{line}\n")
    code, printed = _run(house, *(IMPORTS if caught_by == "BROKEN" else RUFF))
    assert code == 1 and caught_by in printed, printed

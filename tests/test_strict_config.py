"""Anything but a valid config is a ConfigError at once: listed faults, random ones, and proof that both are noticed."""

import os
import random
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from accel_commhooks import CommHookConfig, CommHookKwargs, ConfigError, HookOptions, option
from accel_commhooks.bench.contenders import parse_hook
from accel_commhooks.config import config as config_module
from accel_commhooks.config import strict_yaml
from accel_commhooks.config.config import read_mapping

ROOT = Path(__file__).resolve().parent.parent
HOOK_FILES = sorted((ROOT / "configs").glob("*.yaml"))
SECONDS = 1.0


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch):
    """configs/custom_hook.yaml names a class in examples/."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def each_loader(request, monkeypatch):
    """PyYAML's loader in C, and the one in Python where that is missing."""
    if not hasattr(yaml, request.param):
        pytest.skip("PyYAML was built without libyaml")
    strict = strict_yaml._strict_loader(getattr(yaml, request.param))
    monkeypatch.setattr(strict_yaml, "_strict_loader", lambda: strict)


def refusal(function, *args, **kwargs) -> str:
    """The text of the ConfigError that a call must raise, and soon. CPU time: others use the machine too."""
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    assert time.process_time() - begin < SECONDS
    assert len(caught.value.text) < 1500, "one screen"
    return caught.value.text


BOMB = "l0: &l0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
CHAIN = "l0: &l0 [x]\n" + "".join(f"l{i}: &l{i} [*l{i - 1}]\n" for i in range(1, 2000))
LONG_TEXTS = f"a: &a {'x' * 4000}\nb: [{', '.join(['*a'] * 500)}]\n"


def powersgd(value: str, name: str = "matrix_approximation_rank") -> str:
    return f"comm_hook:\n  name: powersgd\n  {name}: {value}\n"


def local_sgd(options: str) -> str:
    return f"comm_hook:\n  name: post_localsgd\n  {options}\n"


FAULTS = {
    "text tagged as a number": (powersgd("!!int abc"), ["line 3", "'abc' cannot be read as a whole number"]),
    "nothing tagged as a number": (powersgd("!!int ''"), ["line 3", "'' cannot be read as a whole number"]),
    "text tagged as a boolean": (powersgd("!!bool abc", "warm_start"), ["line 3", "'abc'"]),
    "text tagged as null": (powersgd("!!null abc", "wire_dtype"), ["line 3", "'abc'"]),
    "a number without digits": (powersgd("0b_"), ["line 3", "'0b_' cannot be read as a whole number"]),
    "a bad date": (powersgd("2020-13-45"), ["must be a whole number, but got '2020-13-45'"]),
    "a date": (
        powersgd("2020-12-24", "wire_dtype"),
        ["wire_dtype must be one of auto, fp16, bf16, int8, but got '2020-12-24'"],
    ),
    "a date by its tag": (powersgd("!!timestamp 2020-12-24"), ["line 3", "!!timestamp", "is refused"]),
    "5000 digits": (powersgd("1" * 5000), ["line 3", "'1111", "whole number"]),
    "5000 hexadecimal digits": (powersgd("0x" + "f" * 5000), ["line 3", "must fit in 64 bits, but got '0xffff"]),
    "5000 digits for a fraction": (powersgd("1" * 5000, "min_compression_rate"), ["line 3", "'1111"]),
    "65 bits": (powersgd("9223372036854775808", "random_seed"), ["must fit in 64 bits", "9223372036854775808"]),
    "65 bits in a mapping": (powersgd("{a: -9223372036854775809}", "ranks"), ["64 bits", "-9223372036854775809"]),
    "deep lists": (powersgd("[" * 20_000), ["line 3", "nested more than"]),
    "deep mappings": (powersgd("{a: " * 10_000), ["line 3", "nested more than"]),
    "deep blocks": ("".join(" " * i + f"k{i}:\n" for i in range(300)), ["nested more than"]),
    "deep by aliases": (CHAIN + "comm_hook: *l1999\n", ["nested more than"]),
    "an alias bomb": (BOMB + "comm_hook: *l8\n", ["line 4", "values, aliases unfolded"]),
    "a bomb of merged keys": (
        "a0: &a0 {<<: {x: 1}}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}\n" for i in range(1, 20)),
        ["aliases unfolded"],
    ),
    "a bomb of texts": (LONG_TEXTS + "comm_hook: *a\n", ["aliases unfolded"]),
    "a list in itself": ("comm_hook: &a [*a]\n", ["line 1", "alias *a stands inside what it names"]),
    "a mapping in itself": (powersgd("&a {x: *a}", "ranks"), ["line 3", "alias *a stands inside what it names"]),
    "a section in itself": ("comm_hook: &a\n  name: powersgd\n  <<: *a\n", ["line 3", "alias *a"]),
    "too large": ("# " + "x" * 70_000, ["too large", "65536 bytes"]),
    "a key twice": (
        "comm_hook:\n  name: powersgd\n  matrix_approximation_rank: 4\n  matrix_approximation_rank: 8\n",
        ["line 4: the key 'matrix_approximation_rank' was given in line 3 already; keep one of them"],
    ),
    "a section twice": ("comm_hook: powersgd\ncomm_hook: allreduce\n", ["line 2: the key 'comm_hook'", "line 1"]),
    "a key twice in a mapping": (local_sgd("outer: {lr: 0.1, 'lr': 0.2}"), ["line 3: the key 'lr'"]),
    "a number twice": (local_sgd("period_group_size: {4: 8, 0x4: 16}"), ["line 3: the key '0x4'"]),
    "a list for a key": (powersgd("{[a]: 1}", "ranks"), ["line 3", "cannot be a key"]),
    "a tag of Python's": (powersgd("!!python/name:os.system", "wire_dtype"), ["line 3", "!!python/name:os.system"]),
    "a set": (powersgd("!!set {a}", "include"), ["line 3", "'!!set' is refused"]),
    "text in a subgroup": (local_sgd("subgroup: [[a, 0]]"), ["every rank once", "[['a', 0]]"]),
    "true in a subgroup": (local_sgd("subgroup: [[0, true]]"), ["every rank once", "[[0, True]]"]),
    "a fraction in a subgroup": (local_sgd("subgroup: [[0, 1.0]]"), ["every rank once", "[[0, 1.0]]"]),
    "a mapping in a subgroup": (local_sgd("subgroup: [[0, {}]]"), ["every rank once", "[[0, {}]]"]),
    "hours": (powersgd("1:30:00"), ["must be a whole number, but got '1:30:00' (str)"]),
    "minutes and a fraction": (powersgd("1:30.5", "min_compression_rate"), ["must be a number, but got '1:30.5'"]),
    "hours by their tag": (powersgd("!!int 1:30:00"), ["line 3", "'1:30:00'", "base 10"]),
    "an infinite number": (
        powersgd(".inf", "orthogonalization_epsilon"),
        ["orthogonalization_epsilon must be a finite number, but got inf"],
    ),
    "infinite as text": (powersgd("1e999", "orthogonalization_epsilon"), ["must be a finite number, but got inf"]),
    "no number": (powersgd(".nan", "min_compression_rate"), ["must be a finite number, but got nan"]),
    "infinite where whole": (powersgd(".inf"), ["must be a finite number, but got inf"]),
    "infinite in outer": (local_sgd("outer: {lr: .inf}"), ["outer.lr must be a finite number, but got inf"]),
    "nan in outer": (local_sgd("outer: {momentum: .nan}"), ["outer.momentum must be a finite number, but got nan"]),
    "infinite in a list": (local_sgd("subgroup: [[0, .inf]]"), ["subgroup[0][1] must be a finite number"]),
    "an infinite key": (
        local_sgd("period_group_size: {.inf: 2}"),
        ["key of period_group_size must be a finite number"],
    ),
    "infinite in a foreign hook's options": (
        "comm_hook: {name: 'torch:powerSGD_hook', state_options: {start_powerSGD_iter: [.inf]}}",
        ["state_options.start_powerSGD_iter[0] must be a finite number"],
    ),
    "a key that is a number": ("comm_hook: {name: powersgd, 7: 8}", ["hook 'powersgd' has no option 7"]),
    "NUL in a module": ('comm_hook: {name: "a\\0b:c"}', ["package.module:function", "'a\\x00b:c'"]),
    "a relative module": ("comm_hook: {name: '.relative:hook'}", ["package.module:function", "'.relative:hook'"]),
    "a state that is no path": ("comm_hook: {name: 'torch:allreduce_hook', state: group}", ["state", "'group'"]),
    "a number for a keyword": (
        "comm_hook: {name: 'torch:powerSGD_hook', state_options: {1: 2}}",
        ["keys of state_options must be text, but got 1"],
    ),
    "two documents": ("comm_hook: powersgd\n---\ncomm_hook: powersgd\n", ["single document"]),
    "a long name": (f"comm_hook: {'x' * 60_000}", ["there is no hook named 'xxx"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_in_a_file(tmp_path, case, each_loader):
    content, expected = FAULTS[case]
    file = tmp_path / "hook.yaml"
    file.write_text(content)
    text = refusal(CommHookConfig.load, file)
    assert "hook.yaml" in text, "the file at fault must be named"
    for words in expected:
        assert words in text


@pytest.mark.parametrize(
    "text", ["powersgd{ranks: {a: 1, a: 2}}", "powersgd{exclude: !!int abc}", "powersgd{ranks: &a {x: *a}}"]
)
def test_options_on_the_command_line_are_as_strict(text):
    assert "name{option: value, ...}" in refusal(parse_hook, text)


def test_paths_that_cannot_be_read(tmp_path):
    assert "null byte" in refusal(CommHookConfig.load, "a\0b.yaml")
    assert "'a\\x00b.yaml'" in refusal(CommHookConfig.load, Path("a\0b.yaml"))
    assert "xxx" in refusal(CommHookConfig.load, "x" * 100_000 + ".yaml")
    assert "'\\ud800.yaml' cannot be read" in refusal(CommHookConfig.load, "\ud800.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"comm_hook: \xe9\n")
    assert "latin.yaml cannot be read" in refusal(CommHookConfig.load, tmp_path / "latin.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is not a regular file" in refusal(CommHookConfig.load, tmp_path / "pipe.yaml")
    assert "is not a regular file" in refusal(CommHookConfig.load, "/dev/zero")


RAISED = ["ValueError('boom')", "SystemExit('boom')", "ImportError('boom')", "RecursionError('boom')", "Odd('boom')"]


@pytest.mark.parametrize("raised", RAISED)
def test_a_module_that_fails_when_imported(tmp_path, monkeypatch, raised):
    at_import, later = (f"fails_{when}_{RAISED.index(raised)}" for when in ("at_import", "later"))
    (tmp_path / f"{at_import}.py").write_text(f"class Odd(BaseException):\n    pass\nraise {raised}\n")
    (tmp_path / f"{later}.py").write_text(
        f"class Odd(BaseException):\n    pass\ndef __getattr__(_):\n    raise {raised}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for module in (at_import, later):
        text = refusal(CommHookConfig, f"{module}:hook")
        assert f"'{module}:hook' cannot be imported" in text and "boom" in text
    (tmp_path / f"{at_import}.py").write_text("def hook(state, bucket): ...\n# repaired\n")
    assert CommHookConfig(f"{at_import}:hook").name == f"{at_import}:hook"


def test_options_of_a_hook_that_are_no_options(tmp_path, monkeypatch):
    (tmp_path / "no_options.py").write_text(
        "from accel_commhooks import CommHook\nclass Hook(CommHook):\n    Options = dict\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "the Options of 'no_options:Hook' must be a subclass of HookOptions" in refusal(
        CommHookConfig, "no_options:Hook"
    )


def endless_list():
    endless = []
    endless.append(endless)
    return endless


def deep_list(depth=100_000):
    deep = []
    for _ in range(depth):
        deep = [deep]
    return deep


def wide_list(levels=30):
    wide = [0]
    for _ in range(levels):
        wide = [wide] * 9
    return wide


@pytest.mark.parametrize(
    "value",
    [
        10**400,
        10**5000,
        -(10**5000),
        float("inf"),
        [endless_list()],
        {1: 10**5000},
        endless_list(),
        deep_list(),
        wide_list(),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    "name", ["matrix_approximation_rank", "min_compression_rate", "ranks", "wire_dtype", "unknown"]
)
def test_a_mapping_from_python_is_as_strict(name, value):
    mapping = {"name": "powersgd", name: value}
    assert name in refusal(CommHookConfig.from_dict, {"comm_hook": mapping})
    assert name in refusal(CommHookConfig, "powersgd", {name: value})
    refusal(CommHookConfig.from_dict, {"comm_hook": value})
    refusal(CommHookConfig.from_dict, value)
    refusal(CommHookConfig.from_dict, {10**5000: value})
    assert "has no option a whole number of 16610 bits" in refusal(CommHookConfig, "powersgd", {10**5000: value})
    refusal(CommHookConfig.load, "powersgd", unknown=value)
    refusal(CommHookConfig.load, value)


def test_options_are_a_mapping_or_none():
    assert CommHookConfig("powersgd", None) == CommHookConfig("powersgd")
    kwargs = CommHookKwargs(hook="powersgd", options=None)
    assert kwargs._config == CommHookConfig("powersgd")
    kwargs._first_step.remove()
    for wrong in ([], "warm_start", 3, [("warm_start", True)], True):
        assert "options must be a mapping" in refusal(CommHookConfig, "powersgd", wrong)
        assert "options must be a mapping" in refusal(CommHookKwargs, hook="powersgd", options=wrong)
    assert "has no option 7" in refusal(CommHookKwargs, hook="powersgd", options={7: 8})
    assert "has no option 'source'" in refusal(CommHookKwargs, hook="powersgd", options={"source": "x"})


def test_a_rule_of_a_hook_that_trips_over_a_value(monkeypatch):
    """Somebody's own check, which takes for granted what it should have asked."""
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class Careless(HookOptions):
        names: list = option([], "Names.", check=lambda value: "too long" if len(value[0]) > 3 else None)

    text = refusal(Careless.build, "careless", {"names": [7]})
    assert "the options of hook 'careless' cannot be checked: TypeError" in text and "[7]" in text


# What stays as it was.

PLAIN = """
booleans: [yes, no, on, off, true, False, 'no', "yes"]
numbers: [0x1f, 017, 0b11, 1_000, -3, 1.5, 1.0e-8, .5, -.inf, 1e-8, +7]
texts: [plain, 'single', "double\\n", 08, 0.0.0.0, 10.0.0.1:29500, fe80::1, 3.11.7, <<x, 'a: b']
nothing: [~, null, '', ]
key:
base: &base {a: 1, b: {c: 2}}
merged: {<<: *base, a: 3}
again: {<<: [*base, {a: 5, d: 6}]}
alias: *base
tagged: [!!str 12, !!float 3, !!float 1e-8, !!int '7', !!bool 'yes', !!null '']
folded: >
  two
  lines
literal: |
  one
"""


@pytest.mark.parametrize("file", [None, *sorted((ROOT / "configs").rglob("*.yaml"))], ids=str)
def test_ordinary_files_are_read_as_before(tmp_path, file, each_loader):
    if file is None:
        file = tmp_path / "plain.yaml"
        file.write_text(PLAIN)
    assert read_mapping(file) == yaml.safe_load(file.read_text())


def test_dates_and_times_are_text(tmp_path, each_loader):
    file = tmp_path / "times.yaml"
    file.write_text("a: 2020-12-24\nb: 1:30:00\nc: 1:30.5\nd: 2001-12-14t21:59:43.10-05:00\ne: =\n")
    assert read_mapping(file) == {
        "a": "2020-12-24",
        "b": "1:30:00",
        "c": "1:30.5",
        "d": "2001-12-14t21:59:43.10-05:00",
        "e": "=",
    }


# Random faults, several in one file.

NASTY = [
    *("", "~", "yes", "no", "-1", "0", "1", "1.5", ".inf", "-.inf", ".nan", "1e999", "1:30:00", "1:30.5", "0b_", "0x", "017"),
    *("08", "2020-13-45", "2020-12-24", "9" * 30, "1" * 5000, "-" + "9" * 19, "x" * 3000, "!!int abc", "!!float x", "!!bool x"),
    *("!!null x", "!!binary ?", "!!set {a}", "!!omap [a]", "!!python/tuple [1]", "!x y", "[", "]", "{", "}", "[[[]]]"),
    *("{a: {b: c}}", "[" * 200, "{a: " * 200, "[a, 0]", "[[a, 0]]", "[[0, true]]", "[[0, 1], [2]]", "{1: 2}", "{lr: .inf}"),
    *("{lr: 1, lr: 2}", "&a [*a]", "&a", "*a", "*b", "&b {x: 1}", "<<", "{<<: *b}", "'", '"', '"\\0"', '"\\ud800"'),
    *('"\\UFFFFFFFF"', "\0", "\ufeff", "é", "😀", "powersgd", "post_localsgd", "torch:powerSGD_hook", "torch:no"),
    *("textwrap:dedent", "textwrap:", ":x", "a:b:c", ".a:b", "=", "---", "..."),
]  # fmt: skip


def replace_value(lines, chance):
    at = chance.randrange(len(lines))
    lines[at] = lines[at].partition(":")[0] + ": " + chance.choice(NASTY)


def replace_key(lines, chance):
    at = chance.randrange(len(lines))
    lines[at] = "  " + chance.choice(NASTY) + ":" + lines[at].partition(":")[2]


def repeat_line(lines, chance):
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))


def drop_line(lines, chance):
    if len(lines) > 1:
        lines.pop(chance.randrange(len(lines)))


def indent_line(lines, chance):
    at = chance.randrange(len(lines))
    lines[at] = chance.choice([" ", "  ", "\t", "- ", "? "]) + lines[at]


def change_letters(lines, chance):
    at = chance.randrange(len(lines))
    place = chance.randrange(len(lines[at]) + 1)
    with_more = chance.choice(["", ":", "#", "&a ", "*a", "!", "{", "[", ",", "\r", "\0", "0", "\u2028", "'", "|", "%"])
    lines[at] = lines[at][:place] + with_more + lines[at][place + chance.randrange(3) :]


def cut_off(lines, chance):
    lines[-1] = lines[-1][: chance.randrange(len(lines[-1]) + 1)]


MUTATIONS = (replace_value, replace_value, replace_key, repeat_line, drop_line, indent_line, change_letters, cut_off)


def mutants(number: int, seed: int = 0):
    """Valid files with one to four faults each, without comments so that faults hit something."""
    chance = random.Random(seed)
    texts = [re.sub(r"^ *#.*\n", "", file.read_text(), flags=re.MULTILINE) for file in HOOK_FILES]
    for _ in range(number):
        lines = chance.choice(texts).splitlines()
        for _ in range(chance.randint(1, 4)):
            chance.choice(MUTATIONS)(lines, chance)
        yield "\n".join(lines) + "\n"


def repeated_keys(node, seen=()) -> bool:
    """Whether a mapping has the same key twice, seen in PyYAML's nodes and not in what was read."""
    if node in seen or isinstance(node, yaml.ScalarNode) or node is None:
        return False
    children = node.value
    if isinstance(node, yaml.MappingNode):
        keys = [(key.tag, str(key.value)) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            return True
        children = [value for _, value in node.value]
    return any(repeated_keys(child, (*seen, node)) for child in children)


def all_plain(value) -> bool:
    if isinstance(value, dict):
        return all(all_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(all_plain, value))
    if isinstance(value, float):
        return abs(value) < float("inf")
    return value is None or isinstance(value, (str, bool)) or (isinstance(value, int) and abs(value) <= 2**63)


def wrong_outcomes(texts, file: Path) -> tuple[list[str], int]:
    """What went wrong with each text that is neither read as a valid config nor refused at once; how many were valid."""
    wrong, valid = [], 0
    for text in texts:
        file.write_text(text, encoding="utf-8", newline="")
        begin = time.process_time()
        outcome = None
        try:
            config = CommHookConfig.load(file)
            if not all_plain(config.options):
                outcome = f"accepted {config.options}"
            elif repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader)):
                outcome = "accepted a key that is given twice"
            valid += 1
        except ConfigError as error:
            if len(error.text) > 2000:
                outcome = "a text of many screens"
        except Exception as error:
            outcome = type(error).__name__
        if time.process_time() - begin > SECONDS:
            outcome = "slow"
        if outcome is not None:
            wrong.append(f"{outcome}: {text!r}")
    return wrong, valid


def test_random_faults(tmp_path):
    number = 3000
    wrong, valid = wrong_outcomes(mutants(number), tmp_path / "hook.yaml")
    assert wrong == []
    assert number / 30 < valid < number / 2, "most mutations do harm, and some do none"


def test_random_faults_without_the_loader_in_c(tmp_path, monkeypatch):
    strict = strict_yaml._strict_loader(yaml.SafeLoader)
    monkeypatch.setattr(strict_yaml, "_strict_loader", lambda: strict)
    assert wrong_outcomes(mutants(600, seed=1), tmp_path / "hook.yaml")[0] == []


def test_this_test_sees_a_loader_that_raises_other_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "read_yaml", lambda text, where: yaml.safe_load(text))
    seen = {fault.partition(":")[0] for fault in wrong_outcomes(mutants(1000), tmp_path / "hook.yaml")[0]}
    assert {"ValueError", "ScannerError"} <= seen


def test_this_test_sees_a_loader_that_takes_the_last_of_two(tmp_path, monkeypatch):
    strict = strict_yaml._strict_loader()
    monkeypatch.setattr(strict, "refuse_keys", lambda self, node: None)
    wrong, _ = wrong_outcomes(mutants(1000), tmp_path / "hook.yaml")
    assert any(fault.startswith("accepted a key that is given twice") for fault in wrong)


def test_this_test_sees_numbers_that_are_not_finite(tmp_path, monkeypatch):
    from accel_commhooks.config import options

    monkeypatch.setattr(options, "problem_inside", lambda name, value: None)
    infinite = FAULTS["an infinite number"][0], FAULTS["infinite in outer"][0]
    wrong, _ = wrong_outcomes(infinite, tmp_path / "hook.yaml")
    assert wrong[0].startswith("accepted {'orthogonalization_epsilon': inf}")

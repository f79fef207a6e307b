"""Configs from every source, and the exact words for thirty mistakes."""

import sys
import textwrap

import pytest

from accel_commhooks import CommHookConfig, ConfigError
from accel_commhooks.config.config import ENVIRONMENT_VARIABLE
from accel_commhooks.hooks.powersgd.options import PowerSGDOptions


def test_the_same_from_file_mapping_name_and_environment(tmp_path, monkeypatch):
    file = tmp_path / "hook.yaml"
    file.write_text("comm_hook:\n  name: powersgd\n  matrix_approximation_rank: 2\n")
    mapping = {"comm_hook": {"name": "powersgd", "matrix_approximation_rank": 2}}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(file))
    sources = [
        CommHookConfig.load(file),
        CommHookConfig.load(str(file)),
        CommHookConfig.load(mapping),
        CommHookConfig.load("powersgd", matrix_approximation_rank=2),
        CommHookConfig.load(),
        CommHookConfig.from_dict(CommHookConfig.load(mapping).to_dict()),
    ]
    assert all(config == sources[0] for config in sources)
    assert sources[0].build_options() == PowerSGDOptions(matrix_approximation_rank=2)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "bf16")
    assert CommHookConfig.load().name == "bf16"


@pytest.mark.parametrize("alias", ["power_sgd", "batched_power_sgd", "fp16", "bf16", "no"])
def test_accelerates_names_are_aliases(alias):
    assert CommHookConfig(alias).build_options() is not None


def test_numbers_as_yaml_writes_them():
    options = CommHookConfig.load("powersgd", orthogonalization_epsilon="1e-8", min_compression_rate=3).build_options()
    assert options.orthogonalization_epsilon == 1e-8
    assert options.min_compression_rate == 3.0 and isinstance(options.min_compression_rate, float)


def test_extra_options_win_over_the_file(tmp_path):
    file = tmp_path / "hook.yaml"
    file.write_text("comm_hook: {name: powersgd, matrix_approximation_rank: 2}")
    assert CommHookConfig.load(file, matrix_approximation_rank=8).build_options().matrix_approximation_rank == 8


# Mistakes. Each is (what was written, what must be said).

FILES = {
    "empty file": ("", "is empty; expected:"),
    "only a comment": ("# nothing\n", "is empty; expected:"),
    "broken YAML": ("comm_hook: {name: powersgd", "is not valid YAML: while parsing a flow mapping"),
    "a tab": (
        "comm_hook:\n\tname: powersgd\n",
        "is not valid YAML: while scanning for the next token found character",
    ),
    "a list": ("- name: powersgd\n", "must hold a mapping with a 'comm_hook' section, but holds a list"),
    "a bare word": ("powersgd\n", "must hold a mapping with a 'comm_hook' section, but holds a str: powersgd"),
    "no section": ("name: powersgd\n", "has no 'comm_hook' section; it has: name"),
    "misspelt section": ("com_hook: {name: powersgd}", "has no 'comm_hook' section; did you mean 'com_hook'?"),
    "a list in the section": (
        "comm_hook: [powersgd]",
        "must be a mapping or a hook's name, but got ['powersgd'] (list)",
    ),
    "a number in the section": ("comm_hook: 3", "must be a mapping or a hook's name, but got 3 (int)"),
    "no name": ("comm_hook: {matrix_approximation_rank: 4}", "has no 'name'"),
    "misspelt key for the name": ("comm_hook: {nmae: powersgd}", "has no 'name'; did you mean 'nmae'?"),
    "a name that is a number": ("comm_hook: {name: 7}", "the hook's name must be text, but got 7"),
    "an unknown hook": ("comm_hook: {name: powrsgd}", "there is no hook named 'powrsgd'; did you mean 'powersgd'?"),
    "an unknown option": (
        "comm_hook: {name: powersgd, matrix_aproximation_rank: 4}",
        "hook 'powersgd' has no option 'matrix_aproximation_rank'; did you mean 'matrix_approximation_rank'?",
    ),
    "text for a number": (
        "comm_hook: {name: powersgd, matrix_approximation_rank: four}",
        "matrix_approximation_rank must be a whole number, but got 'four' (str); use name: allreduce for no compression",
    ),
    "a fraction for a whole number": (
        "comm_hook: {name: powersgd, matrix_approximation_rank: 1.5}",
        "matrix_approximation_rank must be a whole number, but got 1.5 (float)",
    ),
    "true for a number": (
        "comm_hook: {name: powersgd, matrix_approximation_rank: true}",
        "matrix_approximation_rank must be a whole number, but got True (bool)",
    ),
    "text for true or false": (
        "comm_hook: {name: powersgd, warm_start: maybe}",
        "warm_start must be true or false, but got 'maybe' (str)",
    ),
    "rank zero": (
        "comm_hook: {name: powersgd, matrix_approximation_rank: 0}",
        "matrix_approximation_rank must be at least 1, but got 0; use name: allreduce for no compression",
    ),
    "a negative start": (
        "comm_hook: {name: powersgd, start_powerSGD_iter: -1}",
        "start_powerSGD_iter must be at least 0, but got -1",
    ),
    "a rate of zero": (
        "comm_hook: {name: powersgd, min_compression_rate: 0}",
        "min_compression_rate must be above 0, but got 0.0",
    ),
    "a type that is not a choice": (
        "comm_hook: {name: powersgd, wire_dtype: bf61}",
        "wire_dtype must be one of auto, fp16, bf16, int8, but got 'bf61'; did you mean 'bf16'?",
    ),
    "an unknown wrapper": (
        "comm_hook: {name: allreduce, wrapper: e4m3}",
        "wire_dtype must be one of fp16, bf16, int8, but got 'e4m3'; wrapper is another name for wire_dtype",
    ),
    "ranks_per_node of zero": (
        "comm_hook: {name: allreduce, ranks_per_node: 0}",
        "ranks_per_node must be at least 1, but got 0; leave it out to detect it",
    ),
    "a bad pattern list": (
        "comm_hook: {name: powersgd, exclude: [1]}",
        "patterns must be a list of texts, but got [1]",
    ),
    "a text where a list belongs": (
        "comm_hook: {name: powersgd, exclude: embed}",
        "exclude must be a list, but got 'embed' (str)",
    ),
    "a bad rank by pattern": (
        "comm_hook: {name: powersgd, ranks: {'head*': -1}}",
        "ranks must map name patterns to whole numbers of at least 0, but got 'head*': -1",
    ),
    "noop without acknowledgement": (
        "comm_hook: {name: noop}",
        "for a measurement of the speed limit set i_know_that_replicas_diverge: true",
    ),
    "an unknown outer key": (
        "comm_hook: {name: post_localsgd, outer: {rate: 1}}",
        "outer has the keys name, lr and momentum, but got 'rate'",
    ),
    "an unknown outer optimizer": (
        "comm_hook: {name: post_localsgd, outer: {name: adam}}",
        "outer.name must be one of sgd, nesterov, but got 'adam'",
    ),
    "too much momentum": (
        "comm_hook: {name: post_localsgd, outer: {momentum: 1}}",
        "outer.momentum must be a number of at least 0 and below 1, but got 1",
    ),
    "overlap longer than the period": (
        "comm_hook: {name: post_localsgd, period: 4, overlap_steps: 4}",
        "overlap_steps must be below period",
    ),
    "a subgroup that misses a rank": (
        "comm_hook: {name: post_localsgd, subgroup: [[0, 2]]}",
        "subgroup must be node, none, or lists that hold every rank once",
    ),
    "an unknown step": (
        "comm_hook: {name: zero_overlap, step: forward}",
        "step must be one of optimizer, backward, interleaved, but got 'forward'",
    ),
    "an unknown torch hook": (
        "comm_hook: {name: 'torch:powerSGDhook'}",
        "torch has no communication hook 'powerSGDhook'; did you mean 'powerSGD_hook'?",
    ),
    "a module that does not exist": (
        "comm_hook: {name: 'no_such_module:hook'}",
        "'no_such_module:hook' cannot be imported: No module named 'no_such_module'",
    ),
    "a function that does not exist": (
        "comm_hook: {name: 'textwrap:dedemt'}",
        "the module 'textwrap' has no 'dedemt'; did you mean 'dedent'?",
    ),
    "a wrapper on a foreign hook": (
        "comm_hook: {name: 'torch:allreduce_hook', wrapper: bf16}",
        "hook 'torch:allreduce_hook' has no option 'wrapper'",
    ),
    "one option under two names": (
        "comm_hook: {name: powersgd, wrapper: fp16, wire_dtype: bf16}",
        "'wrapper' and 'wire_dtype' are two names for one option of hook 'powersgd', but both are set "
        "(wrapper: 'fp16', wire_dtype: 'bf16'); keep wire_dtype",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_what_a_malformed_file_is_told(tmp_path, case):
    content, expected = FILES[case]
    file = tmp_path / "hook.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        CommHookConfig.load(file)
    text = caught.value.text
    assert expected in text
    assert "hook.yaml" in text, "the file at fault must be named"
    assert len(text.splitlines()) <= 8 and len(text) < 1200, "one screen"


def test_there_are_thirty_mistakes():
    assert len(FILES) >= 30


def test_missing_files_and_folders(tmp_path, monkeypatch):
    (tmp_path / "powersgd.yaml").write_text("comm_hook: powersgd")
    with pytest.raises(ConfigError) as caught:
        CommHookConfig.load(tmp_path / "powersdg.yaml")
    assert "does not exist; did you mean 'powersgd.yaml'?" in caught.value.text
    with pytest.raises(ConfigError) as caught:
        CommHookConfig.load(tmp_path)
    assert "is a folder; name a YAML file in it" in caught.value.text
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as caught:
        CommHookConfig.load()
    assert "no communication hook was named: pass a name or a path, or set ACCELERATE_COMM_HOOK" in caught.value.text


def test_other_ranks_are_brief(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the error sets its own; this puts it back
    with pytest.raises(ConfigError) as caught:
        CommHookConfig.load("powersdg")
    assert str(caught.value) == "stopped: rank 0 shows the reason"
    assert "did you mean 'powersgd'?" in caught.value.text


def test_a_text_is_a_name_unless_it_looks_like_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings").write_text(textwrap.dedent("comm_hook: bf16_compress"))
    assert CommHookConfig.load("settings").name == "bf16_compress"
    assert CommHookConfig.load("bf16_compress").name == "bf16_compress"

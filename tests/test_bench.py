"""bench, advise and plot: what they accept, what is in a result, and that nothing is lost when one is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from accel_commhooks import ConfigError
from accel_commhooks.bench import models as bench_models
from accel_commhooks.bench.advise import advise
from accel_commhooks.bench.contenders import Contender, hook_contender, parse_hook, parse_hooks, split_hooks
from accel_commhooks.bench.plot import plot
from accel_commhooks.bench.report import markdown_table, print_table, read_result, rows
from accel_commhooks.bench.run import Bench
from accel_commhooks.cli.main import main

FIGURES = ("s_per_step", "mb_within", "mb_between", "optimizer_state_mb", "peak_memory_mb", "tokens_per_s")


# What is accepted.


def test_hooks_are_split_outside_braces():
    hooks = [
        "noop",
        "powersgd{matrix_approximation_rank: 4, alternate: true}",
        "a{b: {c: 1, d: 2}, e: 3}",
        "configs/x.yaml",
    ]
    assert split_hooks(", ".join(hooks)) == hooks


def test_inline_options_are_yaml():
    config = parse_hook("powersgd{matrix_approximation_rank: 2, exclude: [a, b]}")
    assert config.name == "powersgd"
    assert config.options == {"matrix_approximation_rank": 2, "exclude": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersdg", "did you mean 'powersgd'"),
        ("powersgd{rank: 4}", "has no option 'rank'"),
        ("powersgd{: [}", "name{option: value, ...}"),
        ("allreduce,allreduce", "allreduce twice"),
    ],
)
def test_mistakes_in_hooks_are_explained(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_hooks(text)
    assert words in caught.value.text


def test_a_file_is_called_by_its_stem(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("comm_hook: {name: allreduce, wrapper: bf16}")
    contender = hook_contender(str(file))
    assert contender.label == "mine"
    assert contender.config.options["wrapper"] == "bf16"


@pytest.mark.parametrize("wanted", ["1M", "14M", "100M"])
def test_the_built_in_model_has_the_size_asked_for(wanted):
    with torch.device("meta"):
        model = bench_models.load(None, wanted).make_model()
    count = bench_models.parse_count(wanted)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("text", ["", "14Q", "-3M", "many"])
def test_a_size_that_is_none(text):
    with pytest.raises(ConfigError, match="14M"):
        bench_models.parse_count(text)


def tiny():
    model = torch.nn.Linear(4, 4)
    model.forward = lambda x: torch.nn.functional.linear(x, model.weight, model.bias).square().mean()
    return model, lambda batch, seq: {"x": torch.randn(batch, 4)}


def test_models_by_function_and_by_name():
    own = bench_models.load("test_bench:tiny")
    assert own.make_model()(**own.make_batch(2, 3)).ndim == 0
    with pytest.raises(ConfigError, match="cannot be loaded"):
        bench_models.load("test_bench:large")
    with pytest.raises(ConfigError, match="must return"):
        bench_models.load("builtins:dict")
    with pytest.raises(ConfigError, match="no Transformers model"):
        bench_models.load("no-such-model")


def test_a_transformers_name_works_offline(monkeypatch):
    from transformers import BertConfig

    small = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    monkeypatch.setattr("transformers.AutoConfig.for_model", lambda name: small)
    workload = bench_models.load("bert")
    assert workload.make_model()(**workload.make_batch(2, 8)).loss.ndim == 0


# A whole measurement.


def _fail(model):
    raise RuntimeError("it needs\n a GPU")


def _bench(rank, world_size, output):
    contenders = [hook_contender(text) for text in ("ddp", "noop", "allreduce", "powersgd{alternate: true}")]
    workload = bench_models.load(None, "1M")
    return Bench(workload, [*contenders, Contender("broken", _fail)], 2, 8, 3, 2, output).run().to_dict()


@pytest.fixture(scope="module")
def result(pool, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "result.json"
    pool.run(_bench, 2, str(path))
    return path


def test_a_result_has_every_figure(result, capsys):
    content = read_result(result)
    assert content["complete"]
    assert content["ranks"] == 2 and content["nodes"] == 1
    by_label = {entry["label"]: entry for entry in content["contenders"]}
    for label in ("noop", "allreduce", "powersgd{alternate: true}"):
        assert all(by_label[label][name] is not None for name in FIGURES), label
        assert len(by_label[label]["turns"]) == 2
    assert by_label["noop"]["times_noop"] == 1
    assert by_label["noop"]["mb_within"] == 0
    assert by_label["allreduce"]["mb_within"] == pytest.approx(by_label["allreduce"]["predicted"]["mb_within"])
    assert by_label["powersgd{alternate: true}"]["mb_within"] < 0.2 * by_label["allreduce"]["mb_within"]
    # Two moments in float32 for each parameter.
    assert by_label["ddp"]["optimizer_state_mb"] == pytest.approx(8 * content["parameters"] / 1e6, rel=0.01)
    print_table(content)
    table = capsys.readouterr().out
    assert "s/step" in table and "tokens/s" in table


def _all_turns_are_long(rank, world_size, output):
    contenders = [hook_contender(text) for text in ("noop", "post_localsgd{period: 4}")]
    with patch("accel_commhooks.bench.run.SHARE_SECONDS", 1e-6):
        return Bench(bench_models.load(None, "1M"), contenders, 1, 8, 2, 6, output).run().to_dict()


def test_long_turns_sit_out_rounds_but_are_taken_three_times(pool, tmp_path):
    content = pool.run(_all_turns_are_long, 2, str(tmp_path / "result.json"))[0]
    first, second = content["contenders"]
    assert len(first["turns"]) == 3  # rounds 1, 3, 5
    assert len(second["turns"]) == 4  # rounds 1, 2, 4, 6
    # Wherever in the period a turn begins, it holds one averaging.
    assert [turn["mb_within"] for turn in second["turns"]] == [pytest.approx(second["predicted"]["mb_within"])] * 4


def _most_models_alive(rank, world_size, output, one_at_a_time):
    alive, most = weakref.WeakSet(), 0
    workload = bench_models.load(None, "1M")

    def make_model():
        nonlocal most
        model = workload.make_model()
        alive.add(model)
        most = max(most, len(alive))
        return model

    contenders = [
        hook_contender(text) for text in ("ddp", "noop", "powersgd", "post_localsgd{period: 2}", "zero_overlap")
    ]
    counting = replace(workload, make_model=make_model)
    content = Bench(counting, contenders, 1, 8, 2, 2, output, one_at_a_time=one_at_a_time).run().to_dict()
    return most, content["contenders"]


def test_a_model_that_fits_once_can_be_measured(pool, tmp_path):
    for one_at_a_time, expected in ((True, 1), (False, 5)):
        most, entries = pool.run(_most_models_alive, 2, str(tmp_path / "result.json"), one_at_a_time)[0]
        assert most == expected
        assert [len(entry["turns"]) for entry in entries] == [2] * 5
        assert all(turn["mb_within"] == pytest.approx(entry["predicted"]["mb_within"], rel=0.05)
                   for entry in entries[1:] for turn in entry["turns"])  # fmt: skip


PLUGIN = str(Path(__file__).parent / "plugin")


def _third_party(rank, world_size, output):
    sys.path.insert(0, PLUGIN)
    contender = hook_contender("tiny_commhook:TinySignHook{every: 3, first_steps_plain: 1000}")
    return Bench(bench_models.load(None, "1M"), [contender], 1, 8, 2, 2, output).run().to_dict()


def test_a_third_party_hook_has_its_turns_and_its_prediction(own_pool, tmp_path):
    """All from its own file: whole cycles are timed, compression has started, and the formula fits what was counted."""
    (entry,) = own_pool.run(_third_party, 2, str(tmp_path / "result.json"))[0]["contenders"]
    assert entry["hook"]["first_steps_plain"] == 2
    # One step in three sends; a turn of two steps, as asked for, would have sent in none, one or both.
    assert entry["predicted"]["collectives"] == pytest.approx(2 / 3)
    for turn in entry["turns"]:
        assert turn["collectives"] == pytest.approx(entry["predicted"]["collectives"])
        assert turn["mb_within"] == pytest.approx(entry["predicted"]["mb_within"])


def test_what_plain_ddp_sends_is_read_from_the_devices(result):
    """Loopback is everybody's on this machine, so only a lower bound holds here; the laboratory's tests hold both."""
    content = read_result(result)
    entry = next(e for e in content["contenders"] if e["label"] == "ddp")
    assert entry["mb_within"] is None
    assert entry["card_mb_within"] > 0.95 * entry["predicted"]["mb_within"]
    row = next(row for row in rows(content) if row[0] == "ddp")
    assert row[6].startswith("~")


def test_a_contender_that_cannot_run_is_shown_with_the_reason(result, capsys):
    content = read_result(result)
    entry = next(e for e in content["contenders"] if e["label"] == "broken")
    assert entry["error"] == "RuntimeError: it needs a GPU"
    print_table(content)
    assert "broken" in capsys.readouterr().out
    assert "cannot run here: RuntimeError: it needs a GPU" in markdown_table(content)


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_a_whole_partial_result(tmp_path):
    path = tmp_path / "partial.json"
    words = ["bench", "--hooks", "noop,allreduce", "--params", "1M", "--batch", "1", "--seq", "4", "--steps", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_commhooks.cli", *words, "--rounds", "100000", "--output", str(path)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not path.exists() or len(read_result(path)["contenders"][0].get("turns", [])) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    content = read_result(path)
    assert content["complete"] is False
    assert content["contenders"][1]["s_per_step"] > 0
    assert "incomplete" in output


# Advice and pictures.


def _entry(label, seconds, spread=0.01, state=100.0):
    return {
        "label": label,
        "s_per_step": seconds,
        "s_per_step_quartiles": [seconds - spread, seconds + spread],
        "optimizer_state_mb": state,
        "mb_between": 10 * seconds,
        "mb_within": 0.0,
        "times_noop": seconds,
    }


def _result(*entries):
    about = {"model": "m", "parameters": 1e6, "ranks": 2, "nodes": 2, "batch": 1, "seq": 1, "steps": 1, "rounds": 1}
    return {**about, "complete": True, "contenders": list(entries)}


def test_advice_names_the_fastest_and_its_equals():
    noop, plain, zero = _entry("noop", 1.0), _entry("allreduce", 4.0), _entry("zero_overlap", 4.0, state=50.0)
    text = "\n".join(advise(_result(noop, plain, _entry("a", 1.5), _entry("b", 1.51), _entry("c", 5.0), zero)))
    assert "spends 75%" in text
    assert "Use a: 1.500 s/step" in text and "2.67 times as fast" in text
    assert "As fast within the noise: b." in text
    assert "Slower than allreduce here: c." in text
    assert "zero_overlap needs the least optimizer memory: 50 MB" in text


def test_advice_may_be_to_use_none():
    noisy = _result(_entry("noop", 1.0), _entry("allreduce", 1.1, spread=0.3), _entry("a", 1.0, spread=0.3))
    assert any(line.startswith("Use no hook") for line in advise(noisy))
    with pytest.raises(ConfigError, match="add one to --hooks"):
        advise(_result(_entry("a", 1.0)))


def _compare(tmp_path, one, other):
    for name, ratios in (("one", one), ("other", other)):
        entries = [_entry(label, seconds) for label, seconds in ratios.items()]
        (tmp_path / f"{name}.json").write_text(json.dumps(_result(*entries)))
    script = Path(__file__).parent.parent / "benchmarks" / "compare.py"
    files = [str(tmp_path / "one.json"), str(tmp_path / "other.json")]
    done = subprocess.run([sys.executable, str(script), *files], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_two_runs_are_compared(tmp_path):
    one = {"noop": 1.0, "a": 2.0, "b": 2.1, "c": 4.0}
    assert _compare(tmp_path, one, one)[0] == 0
    assert _compare(tmp_path, one, {**one, "a": 2.12})[0] == 0, "a and b are as good as equal"
    code, text = _compare(tmp_path, one, {**one, "c": 4.8})
    assert code == 1 and "largest difference 20.0%, 0 pairs" in text
    code, text = _compare(tmp_path, one, {**one, "b": 1.5})
    assert code == 1 and "a was faster than b, then slower" in text


def test_pictures_of_results_and_logs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "run").mkdir()
    log = [{"step": s, "loss": 3 - s / 10, "comm_mb_between_nodes": 5.0} for s in (5, 10)]
    state = {"global_step": 10, "log_history": [*log, {"step": 10, "train_runtime": 60.0}]}
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "r.json").write_text(json.dumps(_result(_entry("noop", 1.0), _entry("allreduce", 2.0))))
    files = [str(tmp_path / "r.json"), str(tmp_path / "run" / "trainer_state.json")]
    assert main(["plot", *files, "--output", str(tmp_path / "out")]) == 0
    made = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert made == ["loss.png", "loss.svg", "r_bars.png", "r_bars.svg"]
    assert all(str(tmp_path / "out" / name) in capsys.readouterr().out for name in made[:1])


def test_a_run_that_has_not_ended_has_no_clock(tmp_path):
    pytest.importorskip("matplotlib")
    log = [{"step": s, "loss": 3 - s / 10} for s in (5, 10)]
    for name, history in (("ended", [*log, {"step": 10, "train_runtime": 60.0}]), ("under_way", log)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": history}))
    under_way, ended = (str(tmp_path / name / "trainer_state.json") for name in ("under_way", "ended"))
    assert plot([under_way], str(tmp_path))
    with pytest.raises(ConfigError, match="plot under_way separately"):
        plot([under_way, ended], str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"), [("{}", "is neither"), ("[", "cannot be read"), (None, "does not exist")]
)
def test_files_that_are_no_results(tmp_path, content, words):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        plot([str(path)], str(tmp_path))
    with pytest.raises(ConfigError):
        read_result(path)

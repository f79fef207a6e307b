"""docs/accuracy.md: two examples with plain DDP and with each hook, at equal steps, three seeds.

``python benchmarks/accuracy.py`` runs them under the real ``accelerate launch`` on two CPU processes, which stand for two
nodes. A finished run in out/accuracy is not made again, so an interrupted series goes on; delete the folder to start afresh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as pyplot

from accel_commhooks.bench.plot import COLOURS, DASHES, draw_runs, trainer_curve
from accel_commhooks.bench.report import machine, versions, write_json

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "accuracy"
RESULT = ROOT / "benchmarks" / "results" / "accuracy.json"
PAGE = ROOT / "docs" / "accuracy.md"
PLAIN = "plain DDP"
SEEDS = (1, 2, 3)
STEPS = 300
# A file of configs/ and what is changed in it. Each process plays a node, or local SGD would average gradients at every step;
# and a look at the consensus leaves the replicas apart, or every evaluation would be one averaging more.
NODES: dict[str, Any] = {"ranks_per_node": 1}
LOCAL = NODES | {"restore_local": True}
HOOKS = {
    "powersgd": ("powersgd", NODES),
    "post_localsgd": ("post_localsgd", LOCAL),
    "zero_overlap": ("zero_overlap", NODES),
    "powersgd from step 20": ("powersgd", NODES | {"start_powerSGD_iter": 20}),
    "post_localsgd from step 20": ("post_localsgd", LOCAL | {"start_localSGD_iter": 20}),
}
SHIPPED = ("powersgd", "post_localsgd", "zero_overlap")
EARLY = ("powersgd from step 20", "post_localsgd from step 20")
LEARNS_LONGER = ("powersgd", "post_localsgd")
# The sign of an improvement, and how the figure is written.
FIGURES = {"loss": (-1, "{:.4f}"), "accuracy": (1, "{:.2%}")}


@dataclass(frozen=True)
class Task:
    name: str
    script: str
    arguments: tuple[str, ...]
    log: str
    hooks: tuple[str, ...]


CLASSIFIER = Task(
    "classifier",
    "examples/finetune_classification.py",
    ("--eval_steps", "25", "--save_strategy", "no", "--disable_tqdm", "True"),
    "trainer_state.json",
    SHIPPED + EARLY,
)
LANGUAGE_MODEL = Task(
    "language_model",
    "examples/finetune_causal_lm.py",
    ("--eval_steps", "50", "--save_steps", str(STEPS)),
    "log.jsonl",
    LEARNS_LONGER,
)


@dataclass
class Series:
    """One figure of one run, as plot's drawing of seeds wants it."""

    step: list[int]
    loss: list[float]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    tasks = (CLASSIFIER, LANGUAGE_MODEL)
    runs = {task.name: [train(task, label, seed) for seed in SEEDS for label in (PLAIN, *task.hooks)] for task in tasks}
    about = {"versions": versions(), "machine": machine(torch.device("cpu"))}
    result = {"command": "python benchmarks/accuracy.py", **about, "runs": runs}
    write_json(RESULT, result)
    three = (("train", "loss"), ("held_out", "loss"), ("held_out", "accuracy"))
    draw(runs[CLASSIFIER.name], (SHIPPED, EARLY), three, "accuracy_curves.png")
    draw(runs[LANGUAGE_MODEL.name], (LEARNS_LONGER,), three[:2], "accuracy_language_model.png")
    PAGE.write_text(page(result))
    print(PAGE.read_text())


def train(task: Task, label: str, seed: int) -> dict[str, Any]:
    """The figures of one run from its folder; it is made first if it is not there."""
    folder = OUT / task.name / label.replace(" ", "_") / f"seed_{seed}"
    finished = folder / "finished"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(task, label, seed, folder)
        finished.touch()
    return read(folder / task.log, label, seed)


def launch(task: Task, label: str, seed: int, folder: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "configs/accelerate/two_cpu_processes.yaml", task.script, "--offline"]
    command += ["--output_dir", str(folder), "--max_steps", str(STEPS), "--seed", str(seed), *task.arguments]
    if label != PLAIN:
        config, changes = HOOKS[label]
        section = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())["comm_hook"]
        file = folder / "hook.yaml"
        file.write_text(yaml.safe_dump({"comm_hook": section | changes}))
        command += ["--comm_hook", str(file)]
    print(f"{task.name}, {label}, seed {seed}: {STEPS} steps", file=sys.stderr)
    environment = {key: value for key, value in os.environ.items() if key != "ACCELERATE_COMM_HOOK"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        tail = "\n".join((folder / "log.txt").read_text().splitlines()[-30:])
        sys.exit(f"failed with exit code {code}; the end of {folder / 'log.txt'}:\n{tail}")


def read(file: Path, label: str, seed: int) -> dict[str, Any]:
    """The curves of a Trainer's log or of the Accelerate loop's."""
    if file.suffix == ".jsonl":
        state = {"log_history": [json.loads(line) for line in file.read_text().splitlines()]}
    else:
        state = json.loads(file.read_text())
    training = [row for row in state["log_history"] if "loss" in row]
    # At the last step both Trainer and the script evaluate the same model.
    held_out = list({row["step"]: row for row in state["log_history"] if "eval_loss" in row}.values())
    run: dict[str, Any] = {"label": label, "seed": seed, "steps": training[-1]["step"]}
    run["train"] = {name: [row[name] for row in training] for name in ("step", "loss")}
    run["held_out"] = {"step": [row["step"] for row in held_out]}
    run["held_out"] |= {
        name: [row[f"eval_{name}"] for row in held_out] for name in FIGURES if f"eval_{name}" in held_out[0]
    }
    if label != PLAIN:
        run["mb"] = trainer_curve(state, label).mb[-1]
        run["plain_ddp_mb"] = training[-1]["comm_plain_ddp_mb"] * run["steps"]
    return run


def draw(
    runs: list[dict[str, Any]], rows: Sequence[tuple[str, ...]], columns: Sequence[tuple[str, str]], name: str
) -> None:
    size = (4.7 * len(columns), 3.8 * len(rows))
    figure, panels = pyplot.subplots(
        len(rows), len(columns), figsize=size, layout="constrained", sharex=True, sharey="col", squeeze=False
    )
    for line, hooks in zip(panels, rows, strict=True):
        for axes, (part, value) in zip(line, columns, strict=True):
            for number, label in enumerate((PLAIN, *hooks)):
                series = [Series(run[part]["step"], run[part][value]) for run in runs if run["label"] == label]
                draw_runs(axes, series, "step", label, {"color": COLOURS[number], "linestyle": DASHES[number]})
            axes.set(xlabel="optimizer step", title=f"{'training' if part == 'train' else 'held-out'} {value}")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        line[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "images" / name, dpi=110, facecolor="white")
    pyplot.close(figure)


# The page.


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def verdict(ddp: list[float], hook: list[float], better: int) -> str:
    """Whether the hook's mean lies within the spread of DDP's seeds; ``better`` is the sign of an improvement."""
    gain = better * (mean(hook) - mean(ddp))
    if abs(gain) <= spread(ddp):
        return "yes"
    return "yes, better" if gain > 0 else "**no**"


def table(runs: list[dict[str, Any]], hooks: tuple[str, ...], figure: str) -> str:
    return "\n".join(table_rows(runs, hooks, figure))


def table_rows(runs: list[dict[str, Any]], hooks: tuple[str, ...], figure: str) -> Iterator[str]:
    better, form = FIGURES[figure]
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    yield f"| held-out {figure} | {seeds} | mean | max - min | mean - DDP's mean | within DDP's spread |"
    yield "|---" * (len(SEEDS) + 5) + "|"
    final = {label: [run["held_out"][figure][-1] for run in runs if run["label"] == label] for label in (PLAIN, *hooks)}
    for label, values in final.items():
        cells = [label, *map(form.format, values), form.format(mean(values)), form.format(spread(values))]
        difference = form.replace("{:", "{:+").format(mean(values) - mean(final[PLAIN]))
        cells += ["", ""] if label == PLAIN else [difference, verdict(final[PLAIN], values, better)]
        yield f"| {' | '.join(cells)} |"


def at_start(runs: list[dict[str, Any]], figure: str) -> float:
    """Plain DDP's mean over the seeds at step 100, where the shipped hooks start to act."""
    curves = [run["held_out"] for run in runs if run["label"] == PLAIN]
    return mean([curve[figure][curve["step"].index(100)] for curve in curves])


def sent(runs: list[dict[str, Any]]) -> str:
    hooks = [run for run in runs if run["label"] != PLAIN]
    figures = [
        f"{label} {mean([r['mb'] for r in hooks if r['label'] == label]):.0f} MB"
        for label in {r["label"]: 0 for r in hooks}
    ]
    return f"{PLAIN} {hooks[0]['plain_ddp_mb']:.0f} MB, " + ", ".join(figures)


def page(result: dict[str, Any]) -> str:
    classifier, language_model = (result["runs"][task.name] for task in (CLASSIFIER, LANGUAGE_MODEL))
    about = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"""# Accuracy at equal steps

This page is written by

```bash
{result["command"]}
```

which trains the small models of the examples from scratch, {STEPS} optimizer steps on two processes, with plain DDP and with the
hooks of `configs/`. A seed (`--seed`) sets the first weights and the order of the data; the data and its split are always
the same. Held out are modules that are not in the training data.

**The rule.** A hook is within DDP's spread if `|mean(hook) - mean(DDP)| <= max - min` over DDP's seeds; a hook that is better
than DDP by more than that counts as within. Three seeds give a rough idea of a spread, no more.

## Classifier

`examples/finetune_classification.py`: AdamW, learning rate 2e-4 with 20 steps of warm-up, 16 examples a process; 720 passages in
12 classes are held out, chance is 8.3 %. The hooks as shipped: PowerSGD of rank 4 and local SGD with period 8, both from step
100 on, ZeRO overlap from the start.

{table(classifier, SHIPPED, "loss")}

{table(classifier, SHIPPED, "accuracy")}

At step 100 plain DDP's accuracy is already {at_start(classifier, "accuracy"):.1%}, so these tables say little about how the hooks
learn. The same from step 20 on, where the learning rate's warm-up ends:

{table(classifier, EARLY, "loss")}

{table(classifier, EARLY, "accuracy")}

![Training loss, held-out loss and held-out accuracy of the classifier](images/accuracy_curves.png)

As shipped above, from step 20 on below. Lines are means over the seeds, bands span them. A training loss is the mean of ten steps
over both processes; what is evaluated under local SGD is the consensus.

## Language model

`examples/finetune_causal_lm.py`: AdamW, learning rate 1e-3 with 20 steps of warm-up and a cosine, clipping, 2 x 8 examples a
process and step. At step 100, where the hooks as shipped start, plain DDP's held-out loss is
{at_start(language_model, "loss"):.2f}; there is much left to learn.

{table(language_model, LEARNS_LONGER, "loss")}

![Training and held-out loss of the language model](images/accuracy_language_model.png)

## Bytes, and what was changed

Sent by each process in a whole run of the classifier: {sent(classifier)}; of the language model: {sent(language_model)}. Plain
DDP's figures are computed by the hooks.

The files of `configs/` were used with `ranks_per_node: 1`, so that each process plays a node: otherwise `post_localsgd` would
average the gradients of the two at every step and nothing would be tested. It also has `restore_local: true`, so that an
evaluation is not one more averaging.

All curves are in [accuracy.json](../benchmarks/results/accuracy.json). {result["machine"]}, Gloo over loopback; {about}.
"""


if __name__ == "__main__":
    main()

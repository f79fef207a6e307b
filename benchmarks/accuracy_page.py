"""docs/accuracy.md and its pictures, from the runs of accuracy.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from accuracy_tasks import (
    CLASSIFIER,
    FIGURES,
    FINE_TUNING,
    FIRST_TOKEN,
    FROM_20,
    LANGUAGE_MODEL,
    PLAIN,
    PRETRAINING_STEPS,
    ROOT,
    SEEDS,
    SHIPPED,
    SPENDING,
    STEPS,
    TASKS,
    WHAT_TRAVELS,
)

matplotlib.use("Agg")
import matplotlib.pyplot as pyplot

from accel_commhooks.bench.plot import COLOURS, DASHES, draw_runs

PAGE = ROOT / "docs" / "accuracy.md"
Runs = list[dict[str, Any]]


@dataclass
class Series:
    """One figure of one run, as plot's drawing of seeds wants it."""

    step: list[int]
    loss: list[float]


def draw_all(runs: dict[str, Runs]) -> None:
    three = (("train", "loss"), ("held_out", "loss"), ("held_out", "accuracy"))
    draw(runs[CLASSIFIER.name], (SHIPPED, FROM_20), three, "accuracy_curves.png")
    draw(runs[LANGUAGE_MODEL.name], (LANGUAGE_MODEL.hooks[:3],), three[:2], "accuracy_language_model.png")
    draw(runs[FINE_TUNING.name], (SHIPPED,), three[:2], "accuracy_fine_tuning.png")


def draw(runs: Runs, rows: Sequence[tuple[str, ...]], columns: Sequence[tuple[str, str]], name: str) -> None:
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


def table(runs: Runs, hooks: tuple[str, ...], figure: str) -> str:
    return "\n".join(table_rows(runs, hooks, figure))


def finals(runs: Runs, label: str, figure: str) -> list[float]:
    return [run["held_out"][figure][-1] for run in runs if run["label"] == label]


def table_rows(runs: Runs, hooks: tuple[str, ...], figure: str) -> Iterator[str]:
    better, form = FIGURES[figure]
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    yield f"| held-out {figure} | {seeds} | mean | max - min | mean - DDP's mean | within DDP's spread | MB sent |"
    yield "|---" * (len(SEEDS) + 6) + "|"
    ddp = finals(runs, PLAIN, figure)
    for label in (PLAIN, *hooks):
        values = finals(runs, label, figure)
        cells = [label, *map(form.format, values), form.format(mean(values)), form.format(spread(values))]
        difference = form.replace("{:", "{:+").format(mean(values) - mean(ddp))
        cells += ["", ""] if label == PLAIN else [difference, verdict(ddp, values, better)]
        yield f"| {' | '.join([*cells, f'{sent(runs, label):.0f}'])} |"


def sent(runs: Runs, label: str) -> float:
    """MB that a process sends in a run. Plain DDP's are those that the hooks say it would have sent."""
    if label == PLAIN:
        return next(run["plain_ddp_mb"] for run in runs if run["label"] != PLAIN)
    return mean([run["mb"] for run in runs if run["label"] == label])


def spending_rows(runs: Runs) -> Iterator[str]:
    """What travels, and what it is worth, from the step on at which compression starts."""
    start, packed = 20, 66 / 130  # two digits of four bits in a byte, and the scales as they are
    whole, (plain,) = sent(runs, PLAIN), finals(runs, PLAIN, "loss")
    yield "| what travels | bytes saved | held-out loss | gap to DDP |"
    yield "|---|---|---|---|"
    for label in WHAT_TRAVELS:
        compressed = (sent(runs, label) - whole * start / STEPS) * (packed if "int4" in label else 1)
        (loss,) = finals(runs, label, "loss")
        yield f"| {label} | {whole * (1 - start / STEPS) / compressed:.1f} x | {loss:.4f} | {loss - plain:+.4f} |"


def at_start(runs: Runs, figure: str, step: int = 100) -> float:
    """Plain DDP's mean over the seeds at a step; at step 100 the hooks as shipped start to act."""
    curves = [run["held_out"] for run in runs if run["label"] == PLAIN]
    return mean([curve[figure][curve["step"].index(step)] for curve in curves])


def page(result: dict[str, Any]) -> str:
    runs = result["runs"]
    classifier, language_model, fine_tuning, first_token, spending = (runs[task.name] for task in TASKS)
    about = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    spending_table = "\n".join(spending_rows(spending))
    return f"""# Accuracy at equal steps

This page is written by

```bash
{result["command"]}
```

which trains the small models of the examples, {STEPS} optimizer steps on two processes, with plain DDP and with the hooks of
`configs/`. A seed (`--seed`) sets the first weights and the order of the data; the data and its split are always the same. Held
out are modules that are not in the training data.

**The rule.** A hook is within DDP's spread if `|mean(hook) - mean(DDP)| <= max - min` over DDP's seeds; a hook that is better
than DDP by more than that counts as within. Three seeds give a rough idea of a spread, no more.

## A language model, fine-tuned

`examples/finetune_causal_lm.py` on the source of six packages of the standard library, from a model that was trained with plain
DDP for {PRETRAINING_STEPS} steps on six others. AdamW, learning rate 3e-4 with 20 steps of warm-up and a cosine, clipping, 2 x 8
examples a process and step. The hooks as shipped: `powersgd` and `post_localsgd` (period 8) from step 100 on, the others from the
start.

{table(fine_tuning, FINE_TUNING.hooks, "loss")}

![Training and held-out loss of the fine-tuned language model](images/accuracy_fine_tuning.png)

## A language model from scratch

The same script with its own learning rate, 1e-3. At step 100, where `powersgd` and `post_localsgd` as shipped start, plain DDP's
held-out loss is {at_start(language_model, "loss"):.2f}; there is much left to learn. "Rank 4,
float32" is from step 20 on as well.

{table(language_model, LANGUAGE_MODEL.hooks, "loss")}

![Training and held-out loss of the language model](images/accuracy_language_model.png)

## What to spend bytes on

PowerSGD on the same task from step 20 on, seed {SPENDING.seeds[0]}. Bytes are those after step 20; those of int4 are computed, as
the package has no int4: it is int8 with digits from -7 to 7.

{spending_table}

## A classifier from scratch

`examples/finetune_classification.py`: AdamW, learning rate 2e-4 with 20 steps of warm-up, 16 examples a process; 720 passages in
12 classes are held out, chance is 8.3 %.

{table(classifier, SHIPPED, "loss")}

{table(classifier, SHIPPED, "accuracy")}

At step 100 plain DDP's accuracy is already {at_start(classifier, "accuracy"):.1%}, so these tables say little about how the hooks
learn. The same from step 20 on, where the learning rate's warm-up ends:

{table(classifier, FROM_20, "loss")}

{table(classifier, FROM_20, "accuracy")}

![Training loss, held-out loss and held-out accuracy of the classifier](images/accuracy_curves.png)

As shipped above, from step 20 on below. Lines are means over the seeds, bands span them. A training loss is the mean of ten steps
over both processes; what is evaluated under local SGD is the consensus.

**Too early.** A small BERT on the same data classifies by its first token, which must learn to attend to the others first;
learning rate 5e-4, and compression from step 10 on, in the middle of the warm-up:

{table(first_token, FIRST_TOKEN.hooks, "accuracy")}

## What was changed

The files of `configs/` were used with `ranks_per_node: 1`, so that each process plays a node: otherwise `post_localsgd` would
average the gradients of the two at every step and nothing would be tested. It also has `restore_local: true`, so that an
evaluation is not one more averaging. "MB sent" is what each process sends in a whole run; plain DDP's is computed by the hooks.

All curves are in [accuracy.json](../benchmarks/results/accuracy.json). {result["machine"]}, Gloo over loopback; {about}.
"""

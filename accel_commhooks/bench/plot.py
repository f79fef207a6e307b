"""Pictures of what was measured: step times with the limit, bytes, and loss against time and bytes.

A file is a result of bench or of benchmarks/convergence.py, or the ``trainer_state.json`` that a Trainer saves; what is
in it decides what is drawn. Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines also differ in
their dashes, bars carry their figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.errors import ConfigError
from .report import BASELINE, LIMIT, read_json

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "black", YELLOW)
DASHES = ("-", "--", "-.", ":")


@dataclass
class Curve:
    """The loss of one run. Runs of one label are seeds, drawn as their mean and the band they span."""

    label: str
    seconds: list[float]
    mb: list[float]
    loss: list[float]
    timed: bool = True
    """False where the axis shows steps, because the log does not say how long the run took."""


def plot(files: Sequence[str], folder: str) -> list[Path]:
    """Draw all files; returns the paths of the pictures."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plot needs matplotlib; install it with `pip install matplotlib`") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "accel_commhooks", "svg.fonttype": "path", "font.size": 10})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    curves: list[Curve] = []
    for file in files:
        content = _read(file)
        if "contenders" in content:
            pictures += _save(_bars(content), target / f"{Path(file).stem}_bars")
        curves += _curves(content, file)
    if curves:
        pictures += _save(_losses(curves), target / "loss")
    return pictures


def _read(path: str) -> dict[str, Any]:
    content = read_json(path, "file", "name results of bench or a trainer_state.json")
    if not isinstance(content, dict) or not {"contenders", "curves", "log_history"} & content.keys():
        raise ConfigError(f"{path} must be a result of bench or a trainer_state.json, but is neither")
    return content


def _save(figure: Any, path: Path) -> list[Path]:
    import matplotlib.pyplot as pyplot

    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in paths:
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure.savefig(target, dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata)
    pyplot.close(figure)
    return paths


# Bars.


def _bars(result: dict[str, Any]) -> Any:
    """Step times and bytes side by side, the fastest on top."""
    import matplotlib.pyplot as pyplot

    entries = sorted((e for e in result["contenders"] if "s_per_step" in e), key=lambda e: -e["s_per_step"])
    if not entries:
        raise ConfigError("the result holds no finished round, so there is nothing to draw; let bench run longer")
    labels = [_short(entry["label"]) for entry in entries]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure, (times, sent) = pyplot.subplots(1, 2, figsize=(10, 1.4 + 0.3 * lines), sharey=True, layout="constrained")
    places = range(len(entries))
    _time_bars(times, places, entries)
    _byte_bars(sent, places, entries)
    times.set_yticks(places, labels)
    for axes in (times, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
    nodes = result["nodes"]
    figure.suptitle(
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['ranks']} ranks on {nodes} node{'s' if nodes > 1 else ''}"
        + (f", {result['link']}" if "link" in result else ""),
        fontsize=11,
    )
    return figure


def _time_bars(axes: Any, places: range, entries: list[dict[str, Any]]) -> None:
    values = [entry["s_per_step"] for entry in entries]
    low = [entry["s_per_step"] - entry["s_per_step_quartiles"][0] for entry in entries]
    high = [entry["s_per_step_quartiles"][1] - entry["s_per_step"] for entry in entries]
    colours = [_colour(entry) for entry in entries]
    axes.barh(places, values, xerr=(low, high), color=colours, ecolor="#555555", capsize=2)
    for place, value, above in zip(places, values, high, strict=True):
        text = axes.annotate(
            f"{value:.2f}", (value + above, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    limit = next((entry["s_per_step"] for entry in entries if entry["label"] == LIMIT), None)
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="no communication")
        axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_xlabel("s/step (bars: medians, lines: quartiles)")


def _colour(entry: dict[str, Any]) -> str:
    """One colour each for the limit, plain averaging, our hooks, and everything else."""
    if entry["label"] in (LIMIT, BASELINE, "ddp"):
        return SKY if entry["label"] == LIMIT else ORANGE
    return BLUE if "hook" in entry else PURPLE


def _byte_bars(axes: Any, places: range, entries: list[dict[str, Any]]) -> None:
    between = [_sent(entry, "between") for entry in entries]
    within = [_sent(entry, "within") for entry in entries]
    axes.barh(places, between, color=GREEN, label="between nodes")
    if any(value > 0.001 for value in within):
        axes.barh(places, within, left=between, color=YELLOW, hatch="//", edgecolor="#777777", label="within a node")
        axes.legend(frameon=False, fontsize=9)
    for place, value in zip(places, map(sum, zip(between, within, strict=True)), strict=True):
        axes.annotate(f"{value:.3g}", (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlabel("MB sent per node and step")


def _sent(entry: dict[str, Any], scope: str) -> float:
    counted = entry.get(f"mb_{scope}")
    return entry[f"card_mb_{scope}"] if counted is None else counted


def _short(label: str) -> str:
    """``powersgd{matrix_approximation_rank: 4, ...}`` broken into lines, so that the bars keep enough room."""
    name, brace, rest = label.partition("{")
    return label if not brace else "\n".join([name, *(part.strip() for part in rest.rstrip("}").split(","))])


# Losses.


def _curves(content: dict[str, Any], file: str) -> list[Curve]:
    curves = [Curve(c["label"], c["seconds"], c["mb"], c["loss"]) for c in content.get("curves", [])]
    if "log_history" in content:
        curves.append(trainer_curve(content, Path(file).resolve().parent.name))
    return curves


def trainer_curve(state: dict[str, Any], label: str) -> Curve:
    """From a Trainer's log. It has no clock: the length of a run that has ended is spread evenly over its steps."""
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    if not logs:
        raise ConfigError(f"the Trainer log of '{label}' holds no loss; set logging_steps in the training arguments")
    runtime = next((e["train_runtime"] for e in state["log_history"] if "train_runtime" in e), None)
    pace = runtime / state["global_step"] if runtime else 1.0
    sent, mb, before = 0.0, [], 0
    for entry in logs:
        a_step = entry.get("comm_mb_between_nodes", 0.0) + entry.get("comm_mb_within_node", 0.0)
        sent += a_step * (entry["step"] - before)
        before = entry["step"]
        mb.append(sent)
    seconds = [pace * entry["step"] for entry in logs]
    return Curve(label, seconds, mb, [entry["loss"] for entry in logs], timed=runtime is not None)


def _losses(curves: list[Curve]) -> Any:
    import matplotlib.pyplot as pyplot

    clocks = {curve.timed for curve in curves}
    if len(clocks) > 1:
        untimed = ", ".join(sorted({curve.label for curve in curves if not curve.timed}))
        raise ConfigError(f"the log of an unfinished run has no running time; plot {untimed} separately")
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    labels = list(dict.fromkeys(curve.label for curve in curves))
    for number, label in enumerate(labels):
        runs = [curve for curve in curves if curve.label == label]
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
        for axes, name in zip(panels, ("seconds", "mb"), strict=True):
            draw_runs(axes, runs, name, _short(label), style)
    panels[0].set(xlabel="seconds of training" if clocks == {True} else "steps", ylabel="loss")
    panels[1].set(xlabel="MB that a node sent")
    if any(max(curve.mb) > 0 for curve in curves):
        panels[1].set_xscale("symlog", linthresh=max(0.1, min(max(c.mb) for c in curves if max(c.mb) > 0) / 10))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def draw_runs(axes: Any, runs: list[Curve], name: str, label: str, style: dict[str, Any]) -> None:
    """The mean over seeds and the band they span; seeds log at the same steps, their clocks are averaged."""
    length = min(len(run.loss) for run in runs)
    places = [sum(getattr(run, name)[i] for run in runs) / len(runs) for i in range(length)]
    losses = [[run.loss[i] for run in runs] for i in range(length)]
    axes.plot(places, [sum(values) / len(values) for values in losses], label=label, linewidth=1.8, **style)
    if len(runs) > 1:
        axes.fill_between(
            places, list(map(min, losses)), list(map(max, losses)), color=style["color"], alpha=0.15, linewidth=0
        )

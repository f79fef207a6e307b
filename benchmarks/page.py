"""docs/benchmarks.md, and the README's table, from the results of the measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import convergence

from accel_commhooks.bench.plot import plot
from accel_commhooks.bench.report import heading, markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
README_TABLE = re.compile(r"(<!-- bench:begin -->\n).*?(<!-- bench:end -->)", re.DOTALL)

POWERSGD, ALTERNATE = (
    "powersgd{matrix_approximation_rank: 4}",
    "powersgd{matrix_approximation_rank: 4, alternate: true}",
)
LOCAL, OVERLAPPED = "post_localsgd{period: 8}", "post_localsgd{period: 8, overlap_steps: 6}"
ZERO, ZERO_BF16 = "zero_overlap", "zero_overlap{wire_dtype: bf16}"
TORCH_POWERSGD, TORCH_ZERO = "Accelerate POWER_SGD rank 4, one bucket", "torch ZeRO hook's schedule"


def write_page(root: Path) -> Path:
    """Write the page from whatever results there are; the README's table too, between its two marks."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    images = root / "docs" / "images"
    plot(
        [str(RESULTS / f"{name}.json") for name in ("peers", "loopback", "convergence") if name in results], str(images)
    )
    parts = [INTRODUCTION]
    for name, section in SECTIONS:
        wanted = {key: result for key, result in results.items() if key.startswith(name)}
        if name == "size_" and "world_2" in results:
            wanted["world_2"] = results["world_2"]  # the smallest model on two nodes
        if wanted:
            parts += section(wanted)
    page = root / "docs" / "benchmarks.md"
    page.write_text("\n\n".join(parts) + "\n")
    readme = root / "README.md"
    if "peers" in results and readme.exists():
        table = readme_table(results["peers"])
        readme.write_text(README_TABLE.sub(lambda match: match[1] + table + "\n" + match[2], readme.read_text()))
    return page.relative_to(root)


INTRODUCTION = """# Benchmarks

This page is written by `make bench` (as root: the laboratory needs network namespaces), each section from its last run.
Measure your own cluster with `accel-commhooks bench`, which makes the same tables; a hook that wins here may lose there.

How to read the tables. Contenders take turns in one run; those with long turns take part in fewer rounds. Every figure is the
median of a contender's turns, and *quartiles* shows their spread. From run to run the machine itself is up to a tenth faster or
slower, while the link is not, so ratios to `noop` vary by as much, and sometimes by more (`benchmarks/compare.py` compares two
runs). `noop` sends nothing and is the limit of what any hook can reach; `x noop` and `x allreduce` are ratios of step times
(smaller is faster). *blocked s* is the time that the host waits for collectives in a step. MB are what one node sends in a step;
a `~` marks bytes read from the network device, for contenders whose traffic does not pass through our counters."""


def _about(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['machine']}; {versions}.\n\n```\n{result['command']}\n```"


def _peers(results: dict[str, dict]) -> list[str]:
    result = results["peers"]
    return [
        f"## Two nodes, {result['link']}",
        f"{heading(result)}. {_about(result)}",
        "![Step times and bytes](images/peers_bars.png)",
        markdown_table(result),
        "### What each hook must reach",
        _bars_table(list(_bars(result))),
        "The ratio of blocking averaging to `noop` depends on how long a step is. Sending the whole model, 56 MB at 25 MB/s, "
        "every 8 steps takes 0.28 s per step, whoever does it (torch's averager and Accelerate's need the same); *blocked s* "
        "also contains the time that ranks wait for each other. Where a step takes less than 0.56 s, the ratio is therefore "
        "above 1.5.",
    ]


def _loopback(results: dict[str, dict]) -> list[str]:
    result = results["loopback"]
    base = _by_label(result)["ddp"]["s_per_step"]
    entries = [e for e in result["contenders"] if "s_per_step" in e and e["label"] not in ("ddp", "noop", "allreduce")]
    losers = [f"`{e['label']}` ({e['s_per_step'] / base:.2f})" for e in entries if e["s_per_step"] > base]
    lost = (
        f"Slower than plain DDP here (ratio of step times): {', '.join(losers)}."
        if losers
        else "No hook was slower here."
    )
    return [
        "## No slow link: what a hook costs",
        f"Two ranks of one machine communicate over loopback, so there is little to save, and compression costs time. {lost}",
        f"{heading(result)}. {_about(result)}",
        "![Step times and bytes](images/loopback_bars.png)",
        markdown_table(result),
    ]


def _world(results: dict[str, dict]) -> list[str]:
    ordered = sorted(results.values(), key=lambda result: result["ranks"])
    return [
        "## Growth with the number of nodes",
        "Sent by a node in a step, and collectives in a step; *formula* is the hook's `cost`. The card also carries "
        "headers and acknowledgements, up to a kilobyte for each message of a ring, which shows when little is sent.",
        _growth_table(ordered, lambda result: f"{result['nodes']} nodes"),
        f"```\n{ordered[0]['command']}\n```",
    ]


def _size(results: dict[str, dict]) -> list[str]:
    ordered = sorted(results.values(), key=lambda result: result["parameters"])
    return [
        "## Growth with the size of the model",
        "Two nodes. Plain averaging grows with the parameters, PowerSGD about with their square root.",
        _growth_table(ordered, lambda result: f"{result['parameters'] / 1e6:.1f}M"),
        f"```\n{ordered[0]['command']}\n```",
    ]


def _growth_table(results: list[dict], name: Callable[[dict], str]) -> str:
    lines = [
        "| | hook | MB counted | MB on the card | MB by formula | collectives | by formula |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for entry in result["contenders"]:
            predicted = entry["predicted"]
            lines.append(
                f"| {name(result)} | {entry['label']} | {entry['mb_between']:.3f} | {entry['card_mb_between']:.3f} "
                f"| {predicted['mb_between']:.3f} | {entry['collectives']:g} | {predicted['collectives']:g} |"
            )
    return "\n".join(lines)


def _convergence(results: dict[str, dict]) -> list[str]:
    result = results["convergence"]
    seeds = len({curve["seed"] for curve in result["curves"]})
    return [
        "## Seconds to a target loss",
        f"Fine-tuning a {result['parameters'] / 1e6:.1f}M-parameter byte-level model on text that is new to it, two nodes at "
        f"{result['link']}, {seeds} seeds, {result['steps']} steps of {result['batch']} x {result['seq']} a rank. The loss "
        "is the consensus model's on held-out text; the target is the worst final loss of all runs, so that all reach it. "
        "Bands and ranges span the seeds.",
        "![Loss against time and bytes](images/loss.png)",
        convergence.markdown_table(result),
        _about(result),
    ]


SECTIONS = (
    ("peers", _peers),
    ("loopback", _loopback),
    ("convergence", _convergence),
    ("world_", _world),
    ("size_", _size),
)


# Bars.


def _by_label(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["label"]: entry for entry in result["contenders"] if "s_per_step" in entry}


Bar = tuple[str, float, str, float]
"""(what, measured, 'at most' or 'at least', bound)"""


def _bars(result: dict[str, Any]) -> Iterator[Bar]:
    """Every bar whose contenders were measured."""
    entries = _by_label(result)

    def ratio(of: str, to: str, figure: str = "s_per_step") -> float | None:
        return entries[of][figure] / entries[to][figure] if of in entries and to in entries else None

    card = "card_mb_between"
    wanted = [
        ("PowerSGD rank 4: step / no communication", ratio(POWERSGD, "noop"), "at most", 1.15),
        ("PowerSGD rank 4: DDP's step / its step", ratio("ddp", POWERSGD), "at least", 3.5),
        ("PowerSGD rank 4: step / torch's PowerSGD step", ratio(POWERSGD, TORCH_POWERSGD), "at most", 0.9),
        ("PowerSGD rank 4: DDP's bytes / its bytes", ratio("ddp", POWERSGD, card), "at least", 50),
        ("PowerSGD rank 4 alternating: DDP's bytes / its bytes", ratio("ddp", ALTERNATE, card), "at least", 95),
        ("local SGD, period 8: bytes / DDP's bytes", ratio(LOCAL, "ddp", card), "at most", 1 / 8 * 1.01),
        ("local SGD, period 8: step / no communication", ratio(LOCAL, "noop"), "at most", 1.5),
        ("local SGD, overlapped: step / no communication", ratio(OVERLAPPED, "noop"), "at most", 1.15),
        ("ZeRO overlap: optimizer state / DDP's", ratio(ZERO, "ddp", "optimizer_state_mb"), "at most", 0.5 * 1.02),
        ("ZeRO overlap: bytes / DDP's bytes", ratio(ZERO, "ddp", card), "at most", 1.02),
        ("ZeRO overlap in bf16: bytes / DDP's bytes", ratio(ZERO_BF16, "ddp", card), "at most", 0.52),
        ("ZeRO overlap: step / DDP's step", ratio(ZERO, "ddp"), "at most", 1.0),
        ("ZeRO overlap: step of torch's schedule / its step", ratio(TORCH_ZERO, ZERO), "at least", 1.3),
    ]
    for what, measured, kind, bound in wanted:
        if measured is not None:
            yield what, measured, kind, bound


def _bars_table(bars: list[Bar]) -> str:
    lines = ["| | measured | wanted | |", "|---|---|---|---|"]
    for what, measured, kind, bound in bars:
        reached = measured <= bound if kind == "at most" else measured >= bound
        lines.append(f"| {what} | {measured:.4g} | {kind} {bound:.4g} | {'reached' if reached else '**missed**'} |")
    return "\n".join(lines)


# The README.


def readme_table(result: dict[str, Any]) -> str:
    """The short form: who, seconds, how much faster than DDP, bytes."""
    ddp = _by_label(result)["ddp"]
    lines = ["| | s/step | x DDP's speed | MB sent per step | optimizer MB per rank |", "|---|---|---|---|---|"]
    for entry in result["contenders"]:
        if "s_per_step" in entry:
            lines.append(
                f"| {entry['label']} | {entry['s_per_step']:.2f} | {ddp['s_per_step'] / entry['s_per_step']:.2f} "
                f"| {entry['card_mb_between']:.2f} | {entry['optimizer_state_mb']:.0f} |"
            )
        else:
            lines.append(f"| {entry['label']} | cannot run: {entry['error']} | | | |")
    size = f"{result['parameters'] / 1e6:.0f}M parameters, {result['nodes']} nodes at {result['link']}, {result['machine']}"
    return "\n".join([*lines, "", f"{size}; `{result['command']}`"])

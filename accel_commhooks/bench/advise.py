"""Which hook to use, from a bench result: a few sentences. The answer may be "none"."""

from __future__ import annotations

from typing import Any

from ..config.errors import ConfigError
from .report import BASELINE, LIMIT, heading

WORTH = 0.05
"""The share of a step that a hook must save before it is recommended over plain averaging."""


def advise(result: dict[str, Any]) -> list[str]:
    """The advice, line by line."""
    measured = {e["label"]: e for e in result["contenders"] if "s_per_step" in e}
    base = measured.get(BASELINE) or measured.get("ddp")
    if base is None:
        raise ConfigError(f"advice compares with '{BASELINE}' or 'ddp', but the result has neither; add one to --hooks")
    candidates = [e for e in measured.values() if e is not base and e["label"] not in (LIMIT, BASELINE, "ddp")]
    lines = [heading(result)]
    if not result.get("complete", False):
        lines.append("The measurement was interrupted, so this is based on fewer rounds.")
    limit = measured.get(LIMIT)
    if limit is not None:
        waiting = 1 - limit["s_per_step"] / base["s_per_step"]
        lines.append(f"{base['label']} spends {max(0.0, waiting):.0%} of its step on communication ({_step(base)}).")
    gains = sorted((c for c in candidates if _saves(c, base)), key=lambda c: c["s_per_step"])
    if not gains:
        lines.append(f"Use no hook: none of those measured beats {base['label']} by more than the noise.")
    else:
        best = gains[0]
        lines.append(
            f"Use {best['label']}: {_step(best)}, {base['s_per_step'] / best['s_per_step']:.2f} times as fast{_limit(best)}."
        )
        lines += _equals(best, gains[1:])
    lines += [
        f"{e['label']} needs the least optimizer memory: {e['optimizer_state_mb']:.0f} MB/rank instead of "
        f"{base['optimizer_state_mb']:.0f}."
        for e in sorted(candidates, key=lambda e: e["optimizer_state_mb"])[:1]
        if e["optimizer_state_mb"] < 0.9 * base["optimizer_state_mb"]
    ]
    slower = [e["label"] for e in candidates if e["s_per_step"] > (1 + WORTH) * base["s_per_step"]]
    if slower:
        lines.append(f"Slower than {base['label']} here: {', '.join(slower)}.")
    lines.append("Speed is half of it: compare the loss of a short run before relying on a lossy hook.")
    return lines


def _step(entry: dict[str, Any]) -> str:
    low, high = entry["s_per_step_quartiles"]
    return f"{entry['s_per_step']:.3f} s/step, quartiles {low:.3f}-{high:.3f}"


def _limit(entry: dict[str, Any]) -> str:
    return f", {entry['times_noop']:.2f} times the step without communication" if "times_noop" in entry else ""


def _saves(entry: dict[str, Any], base: dict[str, Any]) -> bool:
    """Faster by enough, and by more than the spread of the rounds."""
    clearly = entry["s_per_step_quartiles"][1] < base["s_per_step_quartiles"][0]
    return clearly and entry["s_per_step"] < (1 - WORTH) * base["s_per_step"]


def _equals(best: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """Hooks whose quartiles overlap with the best one's: the measurement does not tell them apart."""
    alike = [e["label"] for e in others if e["s_per_step_quartiles"][0] <= best["s_per_step_quartiles"][1]]
    return [f"As fast within the noise: {', '.join(alike)}."] if alike else []

"""What is soaked: every hook that averages, acting early, and some of them with other options."""

from __future__ import annotations

from typing import Any

from accel_commhooks import available_hooks

POWERSGD = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
LOCAL = {"start_localSGD_iter": 2, "period": 3, "subgroup": "none"}
OUTER = {"name": "nesterov", "lr": 0.7, "momentum": 0.5}

EARLY: dict[str, dict[str, Any]] = {
    "powersgd": POWERSGD,
    "batched_powersgd": POWERSGD,
    "post_localsgd": {**LOCAL, "subgroup": "node"},
}
"""Options that let a hook act after a few steps; a hook that is not here has no delay."""

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd, alternate": ("powersgd", {**POWERSGD, "alternate": True}),
    "powersgd, bf16": ("powersgd", {**POWERSGD, "wire_dtype": "bf16"}),
    "powersgd, int8": ("powersgd", {**POWERSGD, "wire_dtype": "int8"}),
    "post_localsgd, alone": ("post_localsgd", LOCAL),
    "post_localsgd, outer": ("post_localsgd", {**LOCAL, "outer": OUTER}),
    "post_localsgd, overlap": ("post_localsgd", {**LOCAL, "overlap_steps": 2, "optimizer_state": "average"}),
    "post_localsgd, int8": ("post_localsgd", {**LOCAL, "outer": OUTER, "wire_dtype": "int8"}),
    "post_localsgd, restore_local": ("post_localsgd", {**LOCAL, "restore_local": True}),
    "zero_overlap, whole": ("zero_overlap", {"shard_buckets": False}),
    "zero_overlap, bf16": ("zero_overlap", {"wire_dtype": "bf16"}),
    "zero_overlap, int8": ("zero_overlap", {"wire_dtype": "int8"}),
}


def variants(only: list[str] | None = None) -> dict[str, tuple[str, dict[str, Any]]]:
    """(hook, options) by title; ``only`` those whose title or hook is named."""
    every = {name: (name, EARLY.get(name, {})) for name in available_hooks() if name != "noop"} | MORE
    unknown = set(only or ()) - set(every)
    if unknown:
        raise SystemExit(f"no such hook: {', '.join(sorted(unknown))}; there are: {', '.join(every)}")
    return {title: pair for title, pair in every.items() if only is None or title in only or pair[0] in only}

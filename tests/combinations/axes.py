"""The traits, which of them cannot be together in plain DDP, and which the hooks may refuse.

A case is a dictionary with one value for each axis. What is excluded here does not work without a hook either, or has no
meaning; each rule says why.
"""

from __future__ import annotations

from collections.abc import Callable

Case = dict[str, str]

HOOKS: dict[str, tuple[str, dict]] = {
    "allreduce": ("allreduce", {}),
    "bf16": ("bf16_compress", {}),
    "int8": ("int8_compress", {}),
    "powersgd": ("powersgd", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}),
    "powersgd alternate": ("powersgd", {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2, "alternate": True}),
    "powersgd in int8": (
        "powersgd",
        {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2, "wire_dtype": "int8"},
    ),
    "powersgd between nodes": ("powersgd", {"start_powerSGD_iter": 2, "scope": "node", "ranks_per_node": 1}),
    "batched_powersgd": ("batched_powersgd", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}),
    "local": ("post_localsgd", {"start_localSGD_iter": 2, "period": 3, "subgroup": "none"}),
    "local in int8": (
        "post_localsgd",
        {"start_localSGD_iter": 2, "period": 3, "subgroup": "none", "wire_dtype": "int8"},
    ),
    "local in one node": ("post_localsgd", {"start_localSGD_iter": 2, "period": 3, "ranks_per_node": 2}),
    "local outer": (
        "post_localsgd",
        {
            "start_localSGD_iter": 1,
            "period": 3,
            "subgroup": "none",
            "outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9},
        },
    ),
    "local overlap": (
        "post_localsgd",
        {
            "start_localSGD_iter": 1,
            "period": 3,
            "subgroup": "none",
            "overlap_steps": 1,
            "optimizer_state": "average",
        },
    ),
    "local restored": (
        "post_localsgd",
        {"start_localSGD_iter": 2, "period": 3, "subgroup": "none", "restore_local": True},
    ),
    "zero": ("zero_overlap", {"elementwise": ["Subclassed"]}),
    "zero in int8": ("zero_overlap", {"wire_dtype": "int8", "elementwise": ["Subclassed"]}),
    "zero whole": ("zero_overlap", {"shard_buckets": False, "elementwise": ["Subclassed"]}),
    "zero in backward": ("zero_overlap", {"step": "interleaved", "elementwise": ["Subclassed"]}),
}
# Whatever a script does, ranks that agree must not be told that they differ.
HOOKS = {label: (name, {"check_every": 2, **options}) for label, (name, options) in HOOKS.items()}
EXACT = ("allreduce", "local in one node", "zero", "zero whole", "zero in backward")
"""Hooks whose result is plain DDP's."""

AXES: dict[str, list[str]] = {
    "hook": list(HOOKS),
    "model": [
        "tied",
        "batchnorm",
        "part frozen",
        "frozen and thawed",
        "branching",
        "adapters, reentrant checkpoints",
        "checkpoints",
        "scalar parameter",
        "dataclass output",
        "opaque output",
        "compiled",
    ],
    "ddp": ["default", "find_unused", "static_graph", "bucket_view", "one_bucket"],
    "optimizer": ["sgd", "adamw, two groups", "two optimizers", "subclass"],
    "loop": [
        "plain",
        "accumulation",
        "accumulation without no_sync",
        "two forwards",
        "bags",
        "validation with grad",
        "evaluation",
        "closure",
        "discards",
        "discards in place",
        "own collectives",
        "gradients of inputs",
        "failing backwards",
        "failing steps",
        "interrupted forwards",
        "averaging by hand",
        "loss beside the outputs",
    ],
    "precision": ["float32", "autocast", "scaler", "overflow", "clipping"],
    "event": [
        "none",
        "rollback",
        "resume",
        "detach and attach",
        "copies",
        "wrapped anew",
        "weights loaded",
        "consensus",
    ],
    "way": ["attach, optimizer given", "attach", "install"],
}

SEVERAL_FORWARDS = ("two forwards", "bags")
CHANGING = ("frozen and thawed", "branching")
SCALED = ("scaler", "overflow")


def _is(axis: str, *values: str) -> Callable[[Case], bool | None]:
    """Whether a case has one of these values; None while its axis has no value yet."""
    return lambda case: case[axis] in values if axis in case else None


IMPOSSIBLE: list[tuple[str, list[Callable[[Case], bool | None]]]] = [
    ("DDP must be told to look for parameters that have no gradient", [
        _is("model", *CHANGING), lambda case: case["ddp"] != "find_unused" if "ddp" in case else None]),
    ("DDP does not support reentrant checkpoints with find_unused_parameters", [
        _is("model", "adapters, reentrant checkpoints"), _is("ddp", "find_unused")]),
    ("a reentrant checkpoint run twice marks its parameters as ready twice", [
        _is("model", "adapters, reentrant checkpoints"), _is("loop", *SEVERAL_FORWARDS)]),
    ("DDP looks for unused parameters in the last of several forwards only", [
        _is("model", *CHANGING), _is("loop", *SEVERAL_FORWARDS)]),
    ("a static graph has the same forwards in every step", [
        _is("ddp", "static_graph"), _is("loop", "bags", "accumulation", "failing backwards", "validation with grad",
        "gradients of inputs", "interrupted forwards", "averaging by hand")]),
    ("DDP broadcasts buffers in every forward, so ranks must have the same number of them", [
        _is("model", "batchnorm"), _is("loop", "bags", "validation with grad", "evaluation")]),
    ("DDP does not see the outputs of a static graph in a dataclass", [
        _is("model", "dataclass output"), _is("ddp", "static_graph")]),
    ("DDP does not see outputs in an object of the script's own", [
        _is("model", "opaque output"), _is("ddp", "static_graph", "find_unused")]),
    ("DDP does not reduce what was frozen when it was built", [
        _is("model", "frozen and thawed"), _is("event", "wrapped anew")]),
    ("DDP does not look for parameters beside the outputs", [
        _is("loop", "loss beside the outputs"), _is("ddp", "find_unused", "static_graph")]),
    ("the script's own hook on the model cannot be pickled", [
        _is("loop", "loss beside the outputs"), _is("event", "copies")]),
    ("there is one output to look beside", [
        _is("loop", "loss beside the outputs"), _is("model", "dataclass output", "opaque output", "compiled")]),
    ("a GradScaler that has unscaled must step before it is asked again", [
        _is("loop", "failing steps"), _is("precision", *SCALED)]),
    ("averaging by hand needs a gradient of every parameter", [
        _is("loop", "averaging by hand"), _is("model", *CHANGING)]),
    ("a GradScaler does not take closures", [_is("loop", "closure"), _is("precision", *SCALED)]),
    ("two optimizers would run one closure twice", [_is("loop", "closure"), _is("optimizer", "two optimizers")]),
    ("a closure has no place to clip between backward and step", [
        _is("loop", "closure"), _is("precision", "clipping")]),
]  # fmt: skip

REFUSED: list[tuple[str, list[Callable[[Case], bool | None]]]] = [
    ("steps have been taken before gradients are unscaled or clipped", [
        _is("hook", "zero in backward"), _is("precision", *SCALED, "clipping")]),
    ("steps have been taken with gradients that are discarded or added to", [
        _is("hook", "zero in backward"),
        _is("loop", "discards", "discards in place", "accumulation without no_sync", "failing steps")]),
]  # fmt: skip


def _holds(rules: list, case: Case) -> bool:
    return any(all(condition(case) for condition in conditions) for _, conditions in rules)


def possible(case: Case) -> bool:
    """Whether plain DDP can do this; a case may be incomplete."""
    return not _holds(IMPOSSIBLE, case)


def refused(case: Case) -> bool:
    """Whether the hook must say that it cannot do this."""
    return _holds(REFUSED, case)

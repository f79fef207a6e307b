"""What accuracy.py trains: tasks, the hooks that they are trained with, and how each is configured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "accuracy"
PLAIN = "plain DDP"
SEEDS = (1, 2, 3)
STEPS = 300
# Each process plays a node, or local SGD would average gradients at every step; and a look at the consensus leaves the replicas
# apart, or every evaluation would be one averaging more.
NODES: dict[str, Any] = {"ranks_per_node": 1}
LOCAL = NODES | {"restore_local": True}
EARLY = NODES | {"start_powerSGD_iter": 20}
RANK_4 = {"matrix_approximation_rank": 4, "wire_dtype": None}
EMBEDDING_WHOLE = {"exclude": ["*wte*", "*word_embeddings*"]}


def rank(rank: int, wire_dtype: str | None = None, **options: Any) -> tuple[str, dict[str, Any]]:
    return "powersgd", EARLY | {"matrix_approximation_rank": rank, "wire_dtype": wire_dtype} | options


# A file of configs/, or the hook of benchmarks/variants.py, and what is changed in it.
HOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "powersgd": ("powersgd", NODES),
    "int8_compress": ("int8_compress", NODES),
    "post_localsgd": ("post_localsgd", LOCAL),
    "zero_overlap": ("zero_overlap", NODES),
    "powersgd from step 20": ("powersgd", EARLY),
    "post_localsgd from step 20": ("post_localsgd", LOCAL | {"start_localSGD_iter": 20}),
    "powersgd from step 10": ("powersgd", NODES | {"start_powerSGD_iter": 10}),
    "powersgd from step 10, embedding whole": ("powersgd", NODES | {"start_powerSGD_iter": 10} | EMBEDDING_WHOLE),
    "rank 4 in float32 from step 10": ("powersgd", NODES | {"start_powerSGD_iter": 10} | RANK_4),
    "plain mean (outer: {})": ("post_localsgd", LOCAL | {"outer": {}}),
    "rank 4, float32": rank(4),
    "rank 8, float32": rank(8),
    "rank 4, embedding whole": rank(4, **EMBEDDING_WHOLE),
    "rank 4 and the 256 largest rows of the embedding": rank(4, largest_rows=256),
    "rank 16, alternating, bf16": rank(16, "bf16", alternate=True),
    "rank 16, alternating, int8": rank(16, "int8", alternate=True),
    "rank 8, int8": rank(8, "int8"),
    "rank 15, int8": rank(15, "int8"),
    "rank 16, int8": rank(16, "int8"),
    "rank 32, int4": rank(32, "int8", digits=7),
    "rank 16, int4": rank(16, "int8", digits=7),
    "rank 4, residual times 0.9": rank(4, decay=0.9),
}
VARIANT_OPTIONS = ("largest_rows", "digits", "decay")
SHIPPED = ("powersgd", "int8_compress", "post_localsgd", "zero_overlap")
FROM_20 = ("powersgd from step 20", "post_localsgd from step 20")
WHAT_TRAVELS = tuple(label for label in HOOKS if label.startswith("rank ") and "step" not in label)
# The sign of an improvement, and how the figure is written.
FIGURES = {"loss": (-1, "{:.4f}"), "accuracy": (1, "{:.2%}")}


@dataclass(frozen=True)
class Task:
    name: str
    script: str
    arguments: tuple[str, ...]
    log: str
    hooks: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS


CLASSIFY = (
    "examples/finetune_classification.py",
    ("--eval_steps", "25", "--save_strategy", "no", "--disable_tqdm", "True"),
)
MODEL_TEXT = ("examples/finetune_causal_lm.py", ("--eval_steps", "50", "--save_steps", str(STEPS)))
CLASSIFIER = Task("classifier", *CLASSIFY, "trainer_state.json", SHIPPED + FROM_20)
FIRST_TOKEN = Task(
    "first_token",
    CLASSIFY[0],
    (*CLASSIFY[1], "--model_name_or_path", str(OUT / "models" / "first_token_{seed}"), "--learning_rate", "5e-4"),
    "trainer_state.json",
    ("rank 4 in float32 from step 10", "powersgd from step 10", "powersgd from step 10, embedding whole"),
)
LANGUAGE_MODEL = Task(
    "language_model",
    *MODEL_TEXT,
    "log.jsonl",
    (
        "powersgd",
        "int8_compress",
        "post_localsgd",
        "plain mean (outer: {})",
        "powersgd from step 20",
        "rank 4, float32",
    ),
)
SPENDING = Task("spending", *MODEL_TEXT, "log.jsonl", WHAT_TRAVELS, seeds=(1,))
FINE_TUNING = Task(
    "fine_tuning",
    MODEL_TEXT[0],
    (
        *MODEL_TEXT[1],
        *("--model_name_or_path", str(OUT / "models" / "pretrained")),
        *("--dataset_name", str(OUT / "models" / "other_half")),
        *("--learning_rate", "3e-4"),
    ),
    "log.jsonl",
    SHIPPED + FROM_20,
)
TASKS = (CLASSIFIER, LANGUAGE_MODEL, FINE_TUNING, FIRST_TOKEN, SPENDING)
PRETRAINING_STEPS = 3000

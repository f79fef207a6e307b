"""The models and data that accuracy.py's tasks begin with, made once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accuracy_runs import launch
from accuracy_tasks import FIRST_TOKEN, MODEL_TEXT, OUT, PLAIN, PRETRAINING_STEPS, ROOT, Task
from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed

sys.path.insert(0, str(ROOT / "examples"))
import embedded


def make_models() -> None:
    folder = OUT / "models"
    for seed in FIRST_TOKEN.seeds:
        make_once(folder / f"first_token_{seed}", partial(make_first_token_model, seed))
    make_once(folder / "other_half", write_other_half)
    make_once(folder / "pretrained", pretrain)


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    if not folder.exists():
        aside = folder.with_name(f"{folder.name}_unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        make(aside)
        aside.rename(folder)


def make_first_token_model(seed: int, folder: Path) -> None:
    """A small BERT, which classifies by what its first token has attended to, with its first weights."""
    data = embedded.docstring_passages()
    tokenizer = embedded.train_tokenizer(list(data["train"]["text"]), vocab_size=4000)
    set_seed(seed)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=data["train"].features["label"].num_classes,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_other_half(folder: Path) -> None:
    """The source of the packages that the example's language model does not see."""
    for split, rows in embedded.source_text(embedded.PACKAGES[1::2]).items():
        rows.to_json(folder / f"{split}.jsonl")


def pretrain(folder: Path) -> None:
    """The example's language model, trained for longer with plain DDP."""
    arguments = ("--eval_steps", "500", "--save_steps", str(PRETRAINING_STEPS))
    task = Task("pretraining", MODEL_TEXT[0], arguments, "log.jsonl", ())
    launch(task, PLAIN, 0, folder, steps=PRETRAINING_STEPS)

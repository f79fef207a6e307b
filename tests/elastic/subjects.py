"""The scripts: how each is started, how its progress shows, and where a save begins."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launching import hook_config
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Subject:
    title: str
    arguments: Callable[[Path, Path, int], list]
    """(folder of what all runs share, output folder, steps) -> script and arguments."""
    log: str
    """A file in the output folder that gets longer with every step."""
    saves: str
    """A pattern in the output folder: what is there while a checkpoint is being written."""


def _trainer(shared: Path, out: Path, steps: int) -> list:
    hook = hook_config(shared, "powersgd", matrix_approximation_rank=2, start_powerSGD_iter=4)
    script = Path(__file__).parent / "trainer_script.py"
    return [script, "--output_dir", out, "--comm_hook", hook, "--steps", steps]


def _causal_lm(shared: Path, out: Path, steps: int) -> list:
    """The example, with a tiny model of its own."""
    hook = hook_config(shared, "post_localsgd", start_localSGD_iter=4, period=3, subgroup="none", restore_local=True)
    if not (shared / "model").exists():
        _make_model(shared)
    script = REPOSITORY / "examples" / "finetune_causal_lm.py"
    flags = ["--offline", "--max_steps", steps, "--save_steps", 5, "--logging_steps", 1, "--eval_steps", 10**6]
    flags += ["--eval_batches", 1, "--batch_size", 4, "--block_size", 32, "--warmup_steps", 4]
    files = ["--model_name_or_path", shared / "model", "--train_file", shared / "text.txt"]
    return [script, "--output_dir", out, "--comm_hook", hook, *flags, *files]


def _make_model(shared: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(60)]
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(600)]
    (shared / "text.txt").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[EOS]"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]").save_pretrained(
        shared / "model"
    )
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(words) + 2, bos_token_id=1, eos_token_id=1, **size)).save_pretrained(
        shared / "model"
    )


SUBJECTS = {
    "trainer": Subject("Trainer, powersgd", _trainer, "steps.log", "checkpoint-*"),
    "causal_lm": Subject("finetune_causal_lm.py, post_localsgd", _causal_lm, "log.jsonl", "unfinished"),
}

"""Small models, a tokenizer and data for the clients' scripts, made on the spot: nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, GPT2Config, PreTrainedTokenizerFast

WORDS = [
    "red",
    "green",
    "blue",
    "black",
    "white",
    "cat",
    "dog",
    "bird",
    "fish",
    "runs",
    "sleeps",
    "sings",
    "eats",
    "the",
    "a",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
RANK = int(os.environ.get("RANK", 0))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
    )


def sentences(count: int, seed: int) -> list[str]:
    draw = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(WORDS), (count, 6), generator=draw)
    return [" ".join(WORDS[i] for i in row) for row in picks.tolist()]


def gpt2() -> GPT2Config:
    return GPT2Config(
        vocab_size=32,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=5,
        eos_token_id=6,
    )


def bert(**changes) -> BertConfig:
    return BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


def arguments(out: Path, **changes) -> dict:
    """Of any Trainer. Epsilon keeps Adam from making steps of rounding, so that exact hooks can be told from others."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }


def save(model: torch.nn.Module, out: Path, **more) -> None:
    """What the model has learnt, by rank."""
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.save(
        {**state, **{f"({name})": torch.tensor(float(value)) for name, value in more.items()}}, out / f"final_{RANK}.pt"
    )

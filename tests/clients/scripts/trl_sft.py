"""TRL: supervised fine-tuning."""

import sys
from pathlib import Path

import tiny
import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel
from trl import SFTConfig, SFTTrainer

out = Path(sys.argv[1])
torch.manual_seed(0)
trainer = SFTTrainer(
    model=GPT2LMHeadModel(tiny.gpt2()),
    args=SFTConfig(**tiny.arguments(out, max_length=16, gradient_checkpointing=True)),
    train_dataset=Dataset.from_dict({"text": tiny.sentences(256, 1)}),
    processing_class=tiny.tokenizer(),
)
trainer.train()
tiny.save(trainer.model, out)

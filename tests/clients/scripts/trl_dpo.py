"""TRL: direct preference optimization; a reference model beside the one that is trained."""

import sys
from pathlib import Path

import tiny
import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

out = Path(sys.argv[1])
torch.manual_seed(0)
model = GPT2LMHeadModel(tiny.gpt2())
reference = GPT2LMHeadModel(tiny.gpt2())
reference.load_state_dict(model.state_dict())
prompts, chosen, rejected = (tiny.sentences(256, seed) for seed in (1, 2, 3))
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=DPOConfig(**tiny.arguments(out, max_length=24, learning_rate=1e-2)),
    train_dataset=Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected}),
    processing_class=tiny.tokenizer(),
)
trainer.train()
tiny.save(trainer.model, out)

"""Trainer: a sweep, one Trainer after the other on the same model, and a small calibration at the end."""

import sys
from pathlib import Path

import tiny
import torch
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

out = Path(sys.argv[1])
torch.manual_seed(0)
tokens = torch.randint(7, 20, (256, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": int(row.sum()) % 3} for row in tokens]
model = BertForSequenceClassification(tiny.bert(num_labels=3))
trainers = []
for rate in (1e-3, 5e-4, 2e-3):
    trainer = Trainer(
        model=model, args=TrainingArguments(**tiny.arguments(out, learning_rate=rate, max_steps=6)), train_dataset=data
    )
    trainer.train()
    trainers.append(trainer)
temperature = torch.nn.Parameter(torch.ones(()))
calibration = torch.optim.SGD([temperature], lr=0.1)
for _ in range(3):
    (temperature - 2).square().backward()
    calibration.step()
    calibration.zero_grad()
tiny.save(model, out)

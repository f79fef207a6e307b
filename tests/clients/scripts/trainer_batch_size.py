"""Trainer: ``auto_find_batch_size`` runs out of memory at first, and wraps the model again."""

import sys
from pathlib import Path

import tiny
import torch
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

FITS = 4


class Small(BertForSequenceClassification):
    def forward(self, input_ids=None, labels=None, **kwargs):
        if len(input_ids) > FITS:
            raise RuntimeError("CUDA out of memory.")  # in the words that Accelerate looks for
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


out = Path(sys.argv[1])
torch.manual_seed(0)
tokens = torch.randint(7, 20, (256, 8), generator=torch.Generator().manual_seed(1))
trainer = Trainer(
    model=Small(tiny.bert(num_labels=3)),
    args=TrainingArguments(**tiny.arguments(out, auto_find_batch_size=True, per_device_train_batch_size=16)),
    train_dataset=[{"input_ids": row, "labels": int(row.sum()) % 3} for row in tokens],
)
trainer.train()
tiny.save(trainer.model, out)

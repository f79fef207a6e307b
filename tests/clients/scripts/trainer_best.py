"""Trainer: early stopping, and the best model loaded at the end."""

import sys
from pathlib import Path

import tiny
import torch
from transformers import BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments

out = Path(sys.argv[1])
torch.manual_seed(0)
tokens = torch.randint(7, 20, (256, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": int(row.sum()) % 3} for row in tokens]
trainer = Trainer(
    model=BertForSequenceClassification(tiny.bert(num_labels=3)),
    args=TrainingArguments(
        **tiny.arguments(
            out,
            max_steps=30,
            learning_rate=0.05,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )
    ),
    train_dataset=data,
    eval_dataset=data[:32],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
tiny.save(trainer.model, out, best=trainer.state.best_metric, again=trainer.evaluate()["eval_loss"])

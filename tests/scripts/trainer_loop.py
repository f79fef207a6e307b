"""A Trainer script that knows nothing of communication hooks, with Trainer's default arguments where it matters.

With `--global_batch` the number of ranks makes no difference but rounding: they divide each batch, nothing is dropped at
random, and epsilon keeps Adam from making steps of rounding.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Kill(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 100, (size, 12), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 4} for row in tokens]


def main(callbacks=()):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save_at", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill_at", type=int, default=0)
    parser.add_argument("--global_batch", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    dropout = 0.0 if args.global_batch else 0.1
    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    training = TrainingArguments(
        output_dir=args.out,
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=args.global_batch // int(os.environ["WORLD_SIZE"]) or 4,
        learning_rate=1e-3,
        adam_epsilon=1e-3 if args.global_batch else 1e-8,
        logging_steps=2,
        gradient_accumulation_steps=2,
        save_strategy="steps" if args.save_at else "no",
        save_steps=args.save_at or 500,
        eval_strategy="steps" if args.save_at else "no",
        eval_steps=args.save_at or None,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training,
        train_dataset=dataset(512, 1),
        eval_dataset=dataset(32, 2),
        callbacks=[*callbacks, *([Kill(args.kill_at)] if args.kill_at else [])],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    out = Path(args.out)
    torch.save(trainer.model.state_dict(), out / f"final_{training.process_index}.pt")
    torch.save(trainer.state.log_history, out / f"log_{training.process_index}.pt")


if __name__ == "__main__":
    main()

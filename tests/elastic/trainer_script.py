"""A Trainer script as it should be for elastic restarts: it goes on from the last checkpoint that is whole."""

import argparse
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from accel_commhooks.trainer import CommHookCallback, last_whole_checkpoint


class Log(TrainerCallback):
    """Writes a line for every step."""

    def __init__(self, file: Path):
        self.file = file

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with self.file.open("a") as log:
                log.write(f"{state.global_step}\n")


def dataset(size):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 100, (size, 8), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 4} for row in tokens]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--comm_hook", required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=4,
    )
    training = TrainingArguments(
        output_dir=str(arguments.output_dir),
        use_cpu=True,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=5,
        save_total_limit=3,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training,
        train_dataset=dataset(256),
        callbacks=[CommHookCallback(arguments.comm_hook), Log(arguments.output_dir / "steps.log")],
    )
    found = last_whole_checkpoint(arguments.output_dir)
    if training.process_index == 0:
        print("goes on from", found, flush=True)
    trainer.train(resume_from_checkpoint=found)
    trainer.save_model()


if __name__ == "__main__":
    main()

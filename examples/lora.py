"""LoRA and communication hooks: why low-rank compression has nothing to do there, and what local SGD gives instead.

A LoRA gradient is thin already: a pair of r x n and m x r matrices instead of m x n. PowerSGD would send factors of rank 4 of
matrices of rank 8, which is hardly smaller, so it leaves most of them whole and its bytes are nearly plain DDP's. The
message is small anyway; what costs time on a slow link is that there is one at every step. Local SGD talks once in
``period`` steps. The script fine-tunes the same model once for each hook, prints what was sent, and leaves the logs in
OUTPUT_DIR/HOOK/trainer_state.json::

    accelerate launch --config_file configs/accelerate/two_cpu_processes.yaml examples/lora.py --output_dir out/lora --offline

LoRA adapts a model that knows something. The small model from a config knows nothing yet, so it first learns one half of the
classes with all its parameters, and the adapters then teach it the other half.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict
from finetune_classification import TaskArguments, choose_offline, cross_entropy, load_data, load_model
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from accel_commhooks.trainer import CommHookCallback

HOOKS: dict[str, dict] = {
    "allreduce": {},
    "powersgd": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
    "post_localsgd": {"start_localSGD_iter": 20, "period": 8, "subgroup": "none"},
}


@dataclass
class LoraArguments:
    lora_rank: int = field(default=8, metadata={"help": "r: columns of the adapters."})


def main() -> None:
    parser = HfArgumentParser((TaskArguments, LoraArguments, TrainingArguments))
    parser.set_defaults(
        use_cpu=not torch.accelerator.is_available(),
        max_steps=200,
        learning_rate=1e-3,
        warmup_steps=20,
        logging_steps=20,
        save_strategy="no",
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
    )
    task, lora, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    offline = choose_offline(task, training)
    data = load_data(task, offline)
    labels = data["train"].features["label"].names
    tokenizer, base = load_model(task, offline, data, labels)
    data = data.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=task.max_length),
        batched=True,
        remove_columns="text",
    )

    def make_trainer(model: torch.nn.Module, data: DatasetDict, callbacks: list[TrainerCallback]) -> Trainer:
        return Trainer(
            model=model,
            args=training,
            train_dataset=data["train"],
            eval_dataset=data["test"],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_loss_func=cross_entropy,
            compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())},
            callbacks=callbacks,
        )

    if offline and not task.model_name_or_path:
        half = len(labels) // 2
        make_trainer(base, data.filter(lambda row: row["label"] < half), []).train()
        data = data.filter(lambda row: row["label"] >= half)

    rows = []
    for hook, options in HOOKS.items():
        set_seed(training.seed)
        adapters = LoraConfig(task_type="SEQ_CLS", r=lora.lora_rank, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(copy.deepcopy(base), adapters)
        trainer = make_trainer(model, data, [CommHookCallback(hook, **options)])
        trainer.train()
        rows.append((hook, sent(trainer.state.log_history), trainer.evaluate()["eval_accuracy"]))
        if trainer.is_world_process_zero():
            folder = Path(training.output_dir) / hook
            folder.mkdir(parents=True, exist_ok=True)
            trainer.state.save_to_json(str(folder / "trainer_state.json"))

    if trainer.is_world_process_zero():
        print(f"\ngradient of all parameters {megabytes(base):.3f} MB, of adapters and head {megabytes(model):.3f} MB")
        print(f"{'hook':<16}{'MB per step':>16}{'of allreduce':>14}{'accuracy':>10}")
        for hook, sent_megabytes, accuracy in rows:
            print(f"{hook:<16}{sent_megabytes:>16.4f}{sent_megabytes / rows[0][1]:>14.0%}{accuracy:>10.1%}")


def megabytes(model: torch.nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 1e6


def sent(log: list[dict[str, float]]) -> float:
    """Megabytes a step, averaged over the run."""
    figures = [row["comm_mb_within_node"] + row["comm_mb_between_nodes"] for row in log if "comm_mb_within_node" in row]
    return sum(figures) / len(figures)


if __name__ == "__main__":
    main()

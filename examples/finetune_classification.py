"""Fine-tune a text classifier with ``Trainer`` and a communication hook.

The hook is one callback; everything else is an ordinary Trainer script. It takes any model and any dataset with a text and a
label column, and started again with the same command it goes on from its newest checkpoint. Without names it uses AG News
and DistilBERT, or, where there is no hub, the documentation of the standard library and a small ModernBERT (see embedded.py)::

    accelerate launch --config_file configs/accelerate/two_cpu_processes.yaml examples/finetune_classification.py \\
        --comm_hook configs/bf16_compress.yaml --output_dir out/classification --offline --max_steps 300
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import embedded
import evaluate
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import ClassLabel, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accel_commhooks.trainer import CommHookCallback, last_whole_checkpoint

FILE_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json"}


@dataclass
class TaskArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model of the hub, or a folder."})
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    train_file: str | None = field(default=None, metadata={"help": "A csv or json file, instead of a dataset's name."})
    validation_file: str | None = field(
        default=None, metadata={"help": "Held-out rows; a tenth of train_file if none."}
    )
    text_column: str = field(default="text", metadata={"help": "The column with the text."})
    label_column: str = field(default="label", metadata={"help": "The column with the class."})
    max_length: int = field(default=64, metadata={"help": "Tokens of a text that are used."})
    offline: bool = field(default=False, metadata={"help": "Use nothing from the hub (automatic if unreachable)."})

    def __post_init__(self) -> None:
        if self.train_file and Path(self.train_file).suffix not in FILE_KINDS:
            raise ValueError(f"train_file must end in one of {', '.join(FILE_KINDS)}, but got {self.train_file!r}")
        if self.train_file and self.dataset_name:
            raise ValueError(f"name a dataset or a file, but got {self.dataset_name!r} and {self.train_file!r}")
        if self.validation_file and not self.train_file:
            raise ValueError(f"validation_file goes with train_file, but got {self.validation_file!r} alone")


@dataclass
class ScriptArguments(TaskArguments):
    comm_hook: str | None = field(
        default=None,
        metadata={"help": "A hook's name or a YAML file; ACCELERATE_COMM_HOOK if not given; plain DDP without both."},
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        use_cpu=not torch.accelerator.is_available(),
        eval_strategy="steps",
        eval_steps=50,
        logging_steps=10,
        save_steps=100,
        save_total_limit=2,
        learning_rate=2e-4,
        warmup_steps=20,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
    )
    script, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    offline = choose_offline(script, training)

    data = load_data(script, offline)
    labels = data["train"].features["label"].names
    tokenizer, model = load_model(script, offline, data, labels)
    with training.main_process_first():
        data = data.map(
            lambda batch: tokenizer(batch["text"], truncation=True, max_length=script.max_length),
            batched=True,
            remove_columns="text",
        )
    accuracy = evaluate.load(str(Path(__file__).parent / "metrics" / "accuracy") if offline else "accuracy")

    def compute_metrics(prediction) -> dict[str, float]:
        return accuracy.compute(predictions=np.argmax(prediction.predictions, axis=1), references=prediction.label_ids)

    named = script.comm_hook or os.environ.get("ACCELERATE_COMM_HOOK")
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=cross_entropy,
        compute_metrics=compute_metrics,
        callbacks=[CommHookCallback(named)] if named else [],
    )
    result = trainer.train(resume_from_checkpoint=last_whole_checkpoint(training.output_dir, hook=bool(named)))
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    figures = trainer.evaluate()
    trainer.log_metrics("eval", figures)
    trainer.save_metrics("eval", figures)
    trainer.save_state()


def choose_offline(task: TaskArguments, training: TrainingArguments) -> bool:
    """Rank 0 looks for the hub and all ranks do as it says: half of them on other data would train nothing."""
    choice = [task.offline or not embedded.hub_is_reachable()]
    return broadcast_object_list(choice)[0] if training.world_size > 1 else choice[0]


def cross_entropy(outputs, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
    """The mean over all labels of a step. The loss that BERT and its like return themselves does not know of the other
    ranks and of accumulated batches, which Trainer expects of it, and would come out that many times too large."""
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / count


def load_data(task: TaskArguments, offline: bool) -> DatasetDict:
    """Splits 'train' and 'test' with a 'text' and a 'label' column. What was named is never replaced by something else."""
    if task.train_file:
        files = {"train": task.train_file} | ({"test": task.validation_file} if task.validation_file else {})
        data = load_dataset(FILE_KINDS[Path(task.train_file).suffix], data_files=files)
    elif task.dataset_name or not offline:
        data = load_dataset(task.dataset_name or "fancyzhx/ag_news", task.dataset_config_name)
    else:
        return embedded.docstring_passages()
    names = {task.text_column: "text", task.label_column: "label"}
    data = data.rename_columns({old: new for old, new in names.items() if old != new}).select_columns(["text", "label"])
    if "test" not in data:
        if "validation" in data:
            data["test"] = data["validation"]
        else:
            data = data["train"].train_test_split(0.1, seed=0)
    data = DatasetDict({split: data[split] for split in ("train", "test")})
    if not isinstance(data["train"].features["label"], ClassLabel):
        # Not class_encode_column: it numbers each split by itself, and a split may lack a class.
        classes = ClassLabel(names=sorted({str(label) for label in data["train"]["label"]}))
        data = data.map(lambda row: {"label": classes.str2int(str(row["label"]))}).cast_column("label", classes)
    return data


def load_model(task: TaskArguments, offline: bool, data: DatasetDict, labels: list[str]):
    """The tokenizer and the model that were named; otherwise DistilBERT, or a small ModernBERT from a config."""
    names = {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {n: i for i, n in enumerate(labels)},
    }
    if task.model_name_or_path or not offline:
        name = task.model_name_or_path or "distilbert/distilbert-base-uncased"
        return AutoTokenizer.from_pretrained(name), AutoModelForSequenceClassification.from_pretrained(name, **names)
    tokenizer = embedded.train_tokenizer(data["train"]["text"], vocab_size=4000)
    config = AutoConfig.for_model(
        "modernbert",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=task.max_length,
        classifier_pooling="mean",  # learns from scratch at once, where a first token would have to learn to attend first
        pad_token_id=tokenizer.pad_token_id,
        **{f"{kind}_token_id": tokenizer.eos_token_id for kind in ("bos", "eos", "cls", "sep")},
        **names,
    )
    return tokenizer, AutoModelForSequenceClassification.from_config(config)


if __name__ == "__main__":
    main()

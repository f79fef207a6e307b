"""Fine-tune a causal language model in a plain Accelerate loop with a communication hook.

The hook is one ``CommHookKwargs`` among the Accelerator's handlers. Around it stands what a real loop has: gradient
accumulation, clipping, a schedule, evaluation, checkpoints, trackers. Started again with the same command it goes on from its
newest checkpoint. Without names it uses WikiText-2 and DistilGPT2, or, where there is no hub, the source text of the standard
library and a small GPT-2 (see embedded.py)::

    accelerate launch --config_file configs/accelerate/two_cpu_processes.yaml examples/finetune_causal_lm.py \\
        --comm_hook configs/powersgd.yaml --output_dir out/causal_lm --offline
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import embedded
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from datasets import DatasetDict, load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

from accel_commhooks import CommHookKwargs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comm_hook", help="a hook's name or a YAML file; ACCELERATE_COMM_HOOK if not given")
    parser.add_argument("--model_name_or_path", help="a model of the hub, or a folder")
    parser.add_argument("--dataset_name", help="a dataset of the hub with a 'text' column")
    parser.add_argument("--dataset_config_name", help="its configuration, if it has several")
    parser.add_argument("--train_file", help="a text file, instead of a dataset's name; a tenth of it is held out")
    parser.add_argument("--offline", action="store_true", help="use nothing from the hub (automatic if unreachable)")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--block_size", type=int, default=64, help="tokens of one example")
    parser.add_argument("--max_steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="examples of one process and micro-batch")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_steps", type=int, default=20)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--eval_steps", type=int, default=100)
    parser.add_argument("--eval_batches", type=int, default=25, help="held-out batches of each process that are scored")
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--report_to", help="a tracker of Accelerate, such as tensorboard or wandb")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    hook = make_hook(arguments)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        log_with=arguments.report_to,
        project_dir=arguments.output_dir,
        kwargs_handlers=[hook] if hook else [],
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(arguments.seed)
    if arguments.report_to:
        accelerator.init_trackers("finetune_causal_lm", {key: str(value) for key, value in vars(arguments).items()})

    offline = choose_offline(arguments, accelerator)
    data = load_data(arguments, offline)
    tokenizer, model = load_model(arguments, offline, data)
    with accelerator.main_process_first():
        data = make_blocks(data, tokenizer, arguments.block_size)
    # With a generator of its own a loader draws nothing from the one that dropout uses: a resumed run begins an epoch in the
    # middle, and would be one number ahead.
    loader = {"batch_size": arguments.batch_size, "collate_fn": default_data_collator, "generator": torch.Generator()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.01)
    # Accelerate steps a prepared schedule once for each process, so it is made that many times longer.
    schedule = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=arguments.warmup_steps * accelerator.num_processes,
        num_training_steps=arguments.max_steps * accelerator.num_processes,
    )
    model, optimizer, schedule, train_loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(data["train"], shuffle=True, drop_last=True, **loader),
        DataLoader(data["test"], **loader),
    )

    progress = Progress(accelerator, arguments.output_dir)
    step = progress.resume()
    bar = tqdm(total=arguments.max_steps, initial=step, disable=not accelerator.is_main_process)
    running = torch.zeros((), device=accelerator.device)
    micro_batches = 0
    for batch in batches(accelerator, train_loader, step):
        if step >= arguments.max_steps:
            break
        model.train()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        running += loss.detach()
        micro_batches += 1
        if not accelerator.sync_gradients:
            continue
        step += 1
        bar.update()
        if step % arguments.logging_steps == 0:
            loss = accelerator.reduce(running / micro_batches, "mean").item()
            running.zero_()
            micro_batches = 0
            figures = {"loss": loss, "learning_rate": schedule.get_last_lr()[0]}
            progress.log(step, figures | (hook.handle.metrics() if hook and hook.handle else {}))
        if step % arguments.eval_steps == 0 or step == arguments.max_steps:
            # Under local SGD the replicas differ: inside this block the model is their average.
            with hook.handle.consensus() if hook and hook.handle else contextlib.nullcontext():
                progress.log(step, evaluate(accelerator, model, eval_loader, arguments.eval_batches))
        if step % arguments.save_steps == 0 or step == arguments.max_steps:
            progress.save(step)

    bar.close()
    if hook and hook.handle:
        hook.handle.synchronize()
    accelerator.unwrap_model(model).save_pretrained(arguments.output_dir, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(arguments.output_dir)
    accelerator.end_training()


def make_hook(arguments: argparse.Namespace) -> CommHookKwargs | None:
    """The hook that was named on the command line or in the environment; without one, plain DDP."""
    named = arguments.comm_hook or os.environ.get("ACCELERATE_COMM_HOOK")
    return CommHookKwargs(hook=named) if named else None


def batches(accelerator: Accelerator, loader: DataLoader, step: int):
    """Batches for ever, from where a run was interrupted after a step: epochs have seeds, so it sees what it had not seen yet.

    Accelerate steps at the end of an epoch even if fewer batches than asked for have been accumulated by then.
    """
    accumulated = accelerator.gradient_accumulation_steps
    epoch, steps = divmod(step, math.ceil(len(loader) / accumulated))
    skip = steps * accumulated
    while True:
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, skip)
        rest.set_epoch(epoch)  # it counts epochs of its own
        yield from rest
        epoch, skip = epoch + 1, 0


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, count: int) -> dict[str, float]:
    """Loss and perplexity on held-out modules."""
    model.eval()
    losses = []
    with torch.no_grad():
        for _, batch in zip(range(count), loader, strict=False):
            losses.append(model(**batch).loss)
    loss = accelerator.gather(torch.stack(losses)).mean().item()
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 20.0))}


class Progress:
    """Checkpoints and a log in the output folder."""

    def __init__(self, accelerator: Accelerator, folder: Path):
        self._accelerator, self._folder = accelerator, folder
        self._log = folder / "log.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """To the trackers, to the terminal, and to log.jsonl."""
        self._accelerator.log(figures, step=step)
        if self._accelerator.is_main_process:
            tqdm.write(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
            with self._log.open("a") as log:
                log.write(json.dumps({"step": step, **figures}) + "\n")

    def save(self, step: int) -> None:
        """The state of every rank, in a folder that gets its name when all of them are done: it is whole or absent."""
        aside, final = self._folder / "unfinished", self._folder / f"step_{step}"
        if self._accelerator.is_main_process:
            shutil.rmtree(aside, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(aside))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            older = self._checkpoints()
            aside.rename(final)
            for folder in older:
                shutil.rmtree(folder)
        self._accelerator.wait_for_everyone()

    def resume(self) -> int:
        """Load the newest checkpoint and return its step, 0 without one; what was logged after it will come again."""
        found = self._checkpoints()
        step = _step(found[-1]) if found else 0
        if found:
            self._accelerator.load_state(str(found[-1]))
            self._accelerator.print(f"resumed from {found[-1]}")
        if self._accelerator.is_main_process and self._log.exists():
            lines = self._log.read_text().splitlines(keepends=True)
            aside = self._log.with_suffix(".aside")
            aside.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
            aside.replace(self._log)
        return step

    def _checkpoints(self) -> list[Path]:
        return sorted(self._folder.glob("step_*"), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def choose_offline(arguments: argparse.Namespace, accelerator: Accelerator) -> bool:
    """Rank 0 looks for the hub and all ranks do as it says: half of them on other data would train nothing."""
    choice = [arguments.offline or not embedded.hub_is_reachable()]
    return broadcast_object_list(choice)[0] if accelerator.num_processes > 1 else choice[0]


def load_data(arguments: argparse.Namespace, offline: bool) -> DatasetDict:
    """Splits 'train' and 'test' with a 'text' column. What was named is never replaced by something else."""
    if arguments.train_file:
        return load_dataset("text", data_files=arguments.train_file)["train"].train_test_split(0.1, seed=0)
    if arguments.dataset_name:
        data = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    elif not offline:
        data = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    else:
        return embedded.source_text()
    if "test" not in data:
        if "validation" in data:
            data["test"] = data["validation"]
        else:
            data = data["train"].train_test_split(0.1, seed=0)
    return DatasetDict({split: data[split].select_columns("text") for split in ("train", "test")})


def load_model(arguments: argparse.Namespace, offline: bool, data: DatasetDict):
    """The tokenizer and the model that were named; otherwise DistilGPT2, or a small GPT-2 from a config."""
    if arguments.model_name_or_path or not offline:
        name = arguments.model_name_or_path or "distilbert/distilgpt2"
        return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    tokenizer = embedded.train_tokenizer(data["train"]["text"], vocab_size=4000)
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=arguments.block_size,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer, AutoModelForCausalLM.from_config(config)


def make_blocks(data: DatasetDict, tokenizer, size: int) -> DatasetDict:
    """All texts end to end, cut into blocks of equal length; the remainder is dropped."""

    def cut(rows: dict[str, list]) -> dict[str, list]:
        texts = tokenizer(rows["text"], verbose=False)["input_ids"]
        tokens = [token for text in texts for token in (*text, tokenizer.eos_token_id)]
        blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    return data.map(cut, batched=True, remove_columns="text")


if __name__ == "__main__":
    main()

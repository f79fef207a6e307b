"""Seconds to a target loss: a fine-tuning task, the same for every hook, several seeds.

Runs as the ranks of a launcher, for example on a slow link::

    python benchmarks/slow_link.py --rate 200mbit -- python benchmarks/convergence.py --output convergence.json

A small transformer reads bytes. It is first trained on the source code of some packages of the standard library, on every
rank alike and without communication, then fine-tuned on the text of others, in parallel, which is what is measured. The
loss is that of the consensus on text that was held out; the clock and the byte counters stand still while it is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist

from accel_commhooks.bench.contenders import Contender, Trial, hook_contender, split_hooks
from accel_commhooks.bench.models import Batch, BenchTransformer
from accel_commhooks.bench.probes import card_bytes
from accel_commhooks.bench.report import machine, versions, write_json
from accel_commhooks.bench.run import open_ranks

LEARNED_FIRST = ("json", "logging", "asyncio", "concurrent")
FINE_TUNED_ON = ("email", "http", "urllib", "xml")
HOOKS = "allreduce,powersgd{matrix_approximation_rank: 4},post_localsgd{period: 8, restore_local: true}"


def read_bytes(packages: tuple[str, ...]) -> torch.Tensor:
    """The sources of some packages, one after the other."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for package in packages for file in sorted((library / package).rglob("*.py"))]
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in files)), dtype=torch.long)


def sample(text: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    return {"input_ids": torch.stack([text[start : start + length] for start in starts.tolist()])}


class Task:
    """The text, split once, and the model that was trained before."""

    def __init__(self, batch: int, seq: int, width: int, layers: int, first_steps: int):
        self.batch, self.seq = batch, seq
        text = read_bytes(FINE_TUNED_ON)
        held_out = len(text) // 10
        self.train, test = text[:-held_out], text[-held_out:]
        generator = torch.Generator().manual_seed(0)
        self.test = [sample(test, 16, seq, generator) for _ in range(4)]
        torch.manual_seed(0)
        self._model = BenchTransformer(width, layers, vocabulary=256)
        self._learn_first(first_steps)

    def _learn_first(self, steps: int) -> None:
        text = read_bytes(LEARNED_FIRST)
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        for _ in range(steps):
            self._model(**sample(text, self.batch, self.seq, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def model(self) -> torch.nn.Module:
        return copy.deepcopy(self._model)

    def batches(self, seed: int):
        generator = torch.Generator().manual_seed(1000 * (seed + 1) + dist.get_rank())
        while True:
            yield sample(self.train, self.batch, self.seq, generator)


def held_out_loss(trial: Trial, task: Task) -> float:
    """Of the consensus, every rank on its share; the mean is the same on all of them."""
    with trial.handle.consensus() if trial.handle is not None else contextlib.nullcontext(), torch.no_grad():
        mean = torch.stack([trial.model.module(**batch) for batch in task.test]).mean()  # type: ignore[union-attr, operator]
        dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def fine_tune(contender: Contender, task: Task, seed: int, steps: int, every: int) -> dict:
    trial = contender.build(task.model())
    for group in trial.optimizer.param_groups:
        group["lr"] = 5e-4
    batches = task.batches(seed)
    curve: dict = {"label": contender.label, "seed": seed, "step": [], "seconds": [], "mb": [], "loss": []}
    seconds, sent = 0.0, 0
    for step in range(steps + 1):
        if step % every == 0:
            curve["step"].append(step)
            curve["seconds"].append(seconds)
            curve["mb"].append(sent / 1e6)
            curve["loss"].append(held_out_loss(trial, task))
        if step == steps:
            break
        batch = next(batches)
        before, start = sum(card_bytes()), time.perf_counter()
        trial.step(batch)
        seconds += time.perf_counter() - start
        sent += sum(card_bytes()) - before
    if trial.handle is not None:
        trial.handle.detach()
    return curve


def seconds_to(curve: dict, target: float) -> float | None:
    """When the loss first went below the target, between two looks by a straight line."""
    points = list(zip(curve["seconds"], curve["loss"], strict=True))
    for (t0, before), (t1, after) in itertools.pairwise(points):
        if after <= target:
            return t1 if before <= after else t0 + (t1 - t0) * max(0.0, (before - target) / (before - after))
    return None


def summary(curves: list[dict]) -> dict:
    """The target is the worst final loss of any run, so that every run reaches it."""
    target = max(curve["loss"][-1] for curve in curves)
    rows = []
    for label in dict.fromkeys(curve["label"] for curve in curves):
        runs = [curve for curve in curves if curve["label"] == label]
        times = [t for t in (seconds_to(run, target) for run in runs) if t is not None]
        rows.append(
            {
                "label": label,
                "final_loss": sorted(run["loss"][-1] for run in runs),
                "seconds_to_target": sorted(times),
                "seconds": sum(run["seconds"][-1] for run in runs) / len(runs),
                "mb": sum(run["mb"][-1] for run in runs) / len(runs),
            }
        )
    return {"target": target, "summary": rows}


def markdown_table(result: dict) -> str:
    lines = [
        f"| hook | seconds to a loss of {result['target']:.3f} | final loss | seconds in all | MB sent |",
        "|---|---|---|---|---|",
    ]
    for row in result["summary"]:
        low, high = row["seconds_to_target"][0], row["seconds_to_target"][-1]
        lines.append(
            f"| {row['label']} | {low:.1f}-{high:.1f} | {row['final_loss'][0]:.3f}-{row['final_loss'][-1]:.3f} "
            f"| {row['seconds']:.0f} | {row['mb']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hooks", default=HOOKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8, help="steps between two looks at the loss")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", default="convergence.json")
    parsed = parser.parse_args()
    device = open_ranks()
    task = Task(parsed.batch, parsed.seq, parsed.width, parsed.layers, first_steps=150)
    contenders = [hook_contender(text) for text in split_hooks(parsed.hooks)]
    curves = []
    for seed in range(parsed.seeds):
        for contender in contenders:
            curves.append(fine_tune(contender, task, seed, parsed.steps, parsed.every))
            if dist.get_rank() == 0:
                about = {"versions": versions(), "machine": machine(device), "ranks": dist.get_world_size()}
                size = sum(p.numel() for p in task.model().parameters())
                about |= {"parameters": size, "steps": parsed.steps, "batch": parsed.batch, "seq": parsed.seq}
                write_json(parsed.output, {**about, **summary(curves), "curves": curves})
                print(f"{contender.label}, seed {seed}: {curves[-1]['loss'][-1]:.3f}", file=sys.stderr)
    if dist.get_rank() == 0:
        print(markdown_table(summary(curves)))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make demo``: the same fine-tuning with plain DDP and with a hook, on two local processes, side by side.

Both runs are finetune_classification.py under the real ``accelerate launch``, from the same seed on the same data. It prints a
table and draws the curves. Two processes of one machine talk faster than any network, so the seconds show what a hook
costs; the megabytes show what it would save on a slow link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from accel_commhooks.bench.plot import COLOURS, DASHES

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "plain DDP"


@dataclass
class Run:
    name: str
    log: list[dict[str, float]]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of one figure of Trainer's log."""
        rows = [row for row in self.log if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    def mean(self, key: str) -> float | None:
        values = self.series(key)[1]
        return sum(values) / len(values) if values else None

    @property
    def seconds_a_step(self) -> float:
        """Training time without the evaluations inside it."""
        summary = next(row for row in self.log if "train_runtime" in row)
        inside = sum(row["eval_runtime"] for row in self.log if "eval_runtime" in row and row is not self.log[-1])
        return (summary["train_runtime"] - inside) / summary["step"]

    @property
    def megabytes_a_step(self) -> float | None:
        within, between = self.mean("comm_mb_within_node"), self.mean("comm_mb_between_nodes")
        return None if within is None else within + between

    def megabytes_until(self, steps: list[float]) -> list[float]:
        """Sent by each process up to these steps; a row of the log holds the mean since the row before."""
        logged, within = self.series("comm_mb_within_node")
        between = self.series("comm_mb_between_nodes")[1]
        sent = np.diff(logged, prepend=0) * np.add(within, between)
        return np.interp(steps, [0, *logged], [0, *np.cumsum(sent)]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comm_hook", nargs="+", default=["configs/powersgd.yaml"], help="names or YAML files")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--output_dir", type=Path, default=Path("out/demo"))
    arguments = parser.parse_args()
    runs = [train(PLAIN, None, arguments)]
    runs += [train(Path(hook).stem, hook, arguments) for hook in arguments.comm_hook]
    # Plain DDP counts nothing itself; every hook says what DDP would have sent in its place.
    plain_megabytes = runs[1].mean("comm_plain_ddp_mb")
    print_table(runs, plain_megabytes)
    image = arguments.output_dir / "curves.png"
    draw(runs, plain_megabytes, image)
    print(f"\ncurves: {image}")


def train(name: str, hook: str | None, arguments: argparse.Namespace) -> Run:
    """One fine-tuning on two processes, from scratch."""
    folder = (arguments.output_dir / name.replace(" ", "_")).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "configs/accelerate/two_cpu_processes.yaml", "examples/finetune_classification.py"]
    command += ["--offline", "--use_cpu", "--output_dir", str(folder), "--max_steps", str(arguments.max_steps)]
    command += ["--eval_steps", "25", "--save_strategy", "no", "--disable_tqdm", "True"]
    command += ["--comm_hook", hook] if hook else []
    print(f"{name}: {arguments.max_steps} steps on 2 processes ...", end=" ", flush=True)
    started = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if key != "ACCELERATE_COMM_HOOK"}
    log_file = folder / "log.txt"
    with log_file.open("w") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code != 0:
        tail = "\n".join(log_file.read_text().splitlines()[-30:])
        sys.exit(f"failed with exit code {code}; the end of {log_file}:\n{tail}")
    print(f"{time.monotonic() - started:.0f} s")
    return Run(name, json.loads((folder / "trainer_state.json").read_text())["log_history"])


def print_table(runs: list[Run], plain_megabytes: float | None) -> None:
    row = "{:<24}{:>10}{:>12}{:>12}{:>12}"
    print("\n" + row.format("", "loss", "accuracy", "s/step", "MB/step"))
    for run in runs:
        megabytes = plain_megabytes if run.name == PLAIN else run.megabytes_a_step
        print(
            row.format(
                run.name,
                f"{run.series('eval_loss')[1][-1]:.3f}",
                f"{run.series('eval_accuracy')[1][-1]:.1%}",
                f"{run.seconds_a_step:.3f}",
                "not counted" if megabytes is None else f"{megabytes:.3f}",
            )
        )
    print("loss and accuracy: held-out modules, 12 classes; MB: sent by each process")


def draw(runs: list[Run], plain_megabytes: float | None, image: Path) -> None:
    figure, (loss, accuracy, traffic) = plt.subplots(1, 3, figsize=(13, 4))
    for run, colour, dashes in zip(runs, COLOURS, itertools.cycle(DASHES), strict=False):
        style = {"label": run.name, "color": colour, "linestyle": dashes}
        loss.plot(*run.series("loss"), **style)
        steps, scores = run.series("eval_accuracy")
        accuracy.plot(steps, scores, marker="o", **style)
        if run.megabytes_a_step is not None:
            traffic.plot(run.megabytes_until(steps), scores, marker="o", **style)
        elif run.name == PLAIN and plain_megabytes is not None:
            traffic.plot([step * plain_megabytes for step in steps], scores, marker="o", **style)
    loss.set(xlabel="step", ylabel="training loss")
    accuracy.set(xlabel="step", ylabel="held-out accuracy")
    traffic.set(xlabel="MB sent by each process", ylabel="held-out accuracy", xscale="log")
    for panel in (loss, accuracy, traffic):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    main()

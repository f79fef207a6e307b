"""The runs of accuracy.py, each under the real ``accelerate launch``; one that is finished is not made again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from accuracy_tasks import FIGURES, HOOKS, OUT, PLAIN, ROOT, STEPS, VARIANT_OPTIONS, Task

from accel_commhooks.bench.plot import trainer_curve


def train(task: Task, label: str, seed: int) -> dict[str, Any]:
    """The figures of one run from its folder; it is made first if it is not there."""
    folder = OUT / task.name / re.sub(r"\W+", "_", label) / f"seed_{seed}"
    finished = folder / "finished"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(task, label, seed, folder)
        finished.touch()
    return read(folder / task.log, label, seed)


def launch(task: Task, label: str, seed: int, folder: Path, steps: int = STEPS) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "configs/accelerate/two_cpu_processes.yaml", task.script, "--offline"]
    command += ["--output_dir", str(folder), "--max_steps", str(steps), "--seed", str(seed)]
    command += [argument.format(seed=seed) for argument in task.arguments]
    if label != PLAIN:
        config, changes = HOOKS[label]
        section = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())["comm_hook"] | changes
        if not section.keys().isdisjoint(VARIANT_OPTIONS):
            section["name"] = "variants:VariantHook"
        file = folder / "hook.yaml"
        file.write_text(yaml.safe_dump({"comm_hook": section}))
        command += ["--comm_hook", str(file)]
    print(f"{task.name}, {label}, seed {seed}: {steps} steps", file=sys.stderr)
    environment = {key: value for key, value in os.environ.items() if key != "ACCELERATE_COMM_HOOK"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "benchmarks")}
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        tail = "\n".join((folder / "log.txt").read_text().splitlines()[-30:])
        sys.exit(f"failed with exit code {code}; the end of {folder / 'log.txt'}:\n{tail}")


def read(file: Path, label: str, seed: int) -> dict[str, Any]:
    """The curves of a Trainer's log or of the Accelerate loop's."""
    if file.suffix == ".jsonl":
        state = {"log_history": [json.loads(line) for line in file.read_text().splitlines()]}
    else:
        state = json.loads(file.read_text())
    training = [row for row in state["log_history"] if "loss" in row]
    # At the last step both Trainer and the script evaluate the same model.
    held_out = list({row["step"]: row for row in state["log_history"] if "eval_loss" in row}.values())
    run: dict[str, Any] = {"label": label, "seed": seed, "steps": training[-1]["step"]}
    run["train"] = {name: [row[name] for row in training] for name in ("step", "loss")}
    run["held_out"] = {"step": [row["step"] for row in held_out]}
    run["held_out"] |= {
        name: [row[f"eval_{name}"] for row in held_out] for name in FIGURES if f"eval_{name}" in held_out[0]
    }
    if label != PLAIN:
        run["mb"] = trainer_curve(state, label).mb[-1]
        run["plain_ddp_mb"] = training[-1]["comm_plain_ddp_mb"] * run["steps"]
    return run

"""The pictures of this folder's README: every command printed there, run in full, and its curve.

``python examples/curves.py`` takes some ten minutes and writes docs/images/example_*.png. A command that has finished before
is not run again; delete out/examples to start afresh.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from demo import Run

from accel_commhooks.bench.plot import COLOURS, DASHES

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "examples"
IMAGES = ROOT / "docs" / "images"
# Where each of them leaves its losses; plain_ddp.py only prints them. The demo draws its own picture.
LOGS = {
    "finetune_classification": "classification/trainer_state.json",
    "finetune_causal_lm": "causal_lm/log.jsonl",
    "plain_ddp": "plain_ddp.txt",
    "custom_hook": "custom_hook/trainer_state.json",
    "lora": "lora/*/trainer_state.json",
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for command in printed_commands():
        name = "custom_hook" if "custom_hook" in command else re.search(r"examples/(\w+)\.py", command)[1]
        run(name, command)
        image = IMAGES / f"example_{name}.png"
        if name == "demo":
            shutil.copy(ROOT / "out" / "demo" / "curves.png", image)
        else:
            draw([read(file, name) for file in sorted(OUT.glob(LOGS[name]))], image)
        print(image.relative_to(ROOT), flush=True)


def printed_commands() -> list[str]:
    """The lines of the README's bash blocks, continuation lines joined."""
    text = (ROOT / "examples" / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in "\n".join(blocks).replace("\\\n", " ").splitlines() if line.strip()]


def run(name: str, command: str) -> None:
    """As printed, but into out/examples; what it prints goes to a file that gets its name when the command has succeeded."""
    printed, unfinished = OUT / f"{name}.txt", OUT / f"{name}.unfinished"
    if printed.exists():
        return
    folder = re.search(r"--output_dir out/(\w+)", command)
    if folder:
        shutil.rmtree(OUT / folder[1], ignore_errors=True)
        command = command.replace(folder[0], f"--output_dir out/examples/{folder[1]}")
    print(f"$ {command}", flush=True)
    started = time.monotonic()
    with unfinished.open("w") as output:
        code = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    if code != 0:
        tail = "\n".join(unfinished.read_text().splitlines()[-30:])
        sys.exit(f"failed with exit code {code}; the end of {unfinished}:\n{tail}")
    unfinished.rename(printed)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def read(file: Path, name: str) -> Run:
    """The rows of a Trainer's log, of the Accelerate loop's, or of printed lines."""
    text = file.read_text()
    if file.suffix == ".json":
        return Run(file.parent.name if name == "lora" else name, json.loads(text)["log_history"])
    if file.suffix == ".jsonl":
        return Run(name, [json.loads(line) for line in text.splitlines()])
    lines = re.findall(r"^step (\d+): loss (\S+)", text, re.MULTILINE)
    return Run(name, [{"step": int(step), "loss": float(loss)} for step, loss in lines])


def draw(runs: list[Run], image: Path) -> None:
    """Losses against steps and, where the log has bytes, against the megabytes that each process had sent."""
    counted = all(run.megabytes_a_step is not None for run in runs)
    figure, panels = plt.subplots(1, 1 + counted, figsize=(5.5 * (1 + counted), 3.6), squeeze=False, sharey=True)
    for run, colour, dashes in zip(runs, COLOURS, DASHES, strict=False):
        for key, what, marker in (("loss", "training", ""), ("eval_loss", "held out", "o")):
            steps, losses = run.series(key)
            if len(steps) > 1:
                style = {"label": f"{run.name}, {what}", "color": colour, "linestyle": dashes, "marker": marker}
                panels[0, 0].plot(steps, losses, **style)
                if counted:
                    panels[0, 1].plot(run.megabytes_until(steps), losses, **style)
    panels[0, 0].set(xlabel="optimizer step", ylabel="loss")
    panels[0, -1].set(xlabel="MB sent by each process" if counted else "optimizer step")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    panels[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(image, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()

"""docs/accuracy.md: the examples with plain DDP and with each hook, at equal steps, three seeds.

``python benchmarks/accuracy.py`` runs them under the real ``accelerate launch`` on two CPU processes, which stand for two
nodes. A finished run in out/accuracy is not made again, so an interrupted series goes on; delete the folder to start afresh.
"""

from __future__ import annotations

import argparse

import torch
from accuracy_models import make_models
from accuracy_page import PAGE, draw_all, page
from accuracy_runs import train
from accuracy_tasks import PLAIN, ROOT, TASKS

from accel_commhooks.bench.report import machine, versions, write_json

RESULT = ROOT / "benchmarks" / "results" / "accuracy.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", help="only make the runs of these, and write nothing")
    chosen = parser.parse_args().tasks
    make_models()
    runs = {
        task.name: [train(task, label, seed) for seed in task.seeds for label in (PLAIN, *task.hooks)]
        for task in TASKS
        if not chosen or task.name in chosen
    }
    if chosen:
        return
    about = {"versions": versions(), "machine": machine(torch.device("cpu"))}
    result = {"command": "python benchmarks/accuracy.py", **about, "runs": runs}
    write_json(RESULT, result)
    draw_all(runs)
    PAGE.write_text(page(result))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()

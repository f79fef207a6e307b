"""A bench result: what is in its file, and the table made from it.

The file is written to a temporary file and renamed after every turn, so an interrupted run leaves a complete file behind,
with ``"complete": false`` and the rounds that were finished.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..comm.topology import Topology
from ..config.errors import ConfigError

if TYPE_CHECKING:
    from ..comm.cost import Prediction
    from .contenders import Contender
    from .run import Bench

LIMIT, BASELINE = "noop", "allreduce"


@dataclass
class Result:
    """Grows while the contenders take their turns."""

    about: dict[str, Any]
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def start(cls, bench: Bench, model: torch.nn.Module, topology: Topology) -> Result:
        return cls(
            {
                "command": _command(),
                "started": time.strftime("%Y-%m-%d %H:%M:%S"),
                "versions": versions(),
                "machine": machine(bench.device),
                "ranks": topology.world_size,
                "nodes": len(topology.nodes),
                "model": bench.workload.name,
                "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "batch": bench.batch,
                "seq": bench.seq,
                "steps": bench.steps,
                "rounds": bench.rounds,
            }
        )

    def add(self, contender: Contender, prepared: dict[str, Any], prediction: Prediction | None) -> None:
        """A contender that is ready, or the reason why it is not."""
        entry: dict[str, Any] = {"label": contender.label}
        if contender.config is not None:
            entry["hook"] = {"name": contender.config.name, **contender.config.options}
        if "error" in prepared:
            entry["error"] = prepared["error"]
        else:
            entry |= {
                "optimizer_state_mb": prepared["state"] / 1e6,
                "peak_memory_mb": prepared["peak"] / 1e6,
                "turns": [],
            }
        if prediction is not None:
            entry["predicted"] = {
                "mb_within": prediction.within / 1e6,
                "mb_between": prediction.between / 1e6,
                "collectives": prediction.collectives,
            }
        self.contenders[contender.label] = entry

    def add_round(self, label: str, figures: dict[str, Any]) -> None:
        self.contenders[label]["turns"].append(figures)

    def to_dict(self) -> dict[str, Any]:
        entries = [dict(entry) for entry in self.contenders.values()]
        for entry in entries:
            entry.update(_medians(entry.get("turns", [])))
        for name, other in (("times_noop", LIMIT), ("times_allreduce", BASELINE)):
            base = next((e["s_per_step"] for e in entries if e["label"] == other and "s_per_step" in e), None)
            for entry in entries:
                if base is not None and "s_per_step" in entry:
                    entry[name] = entry["s_per_step"] / base
        return {"complete": self.complete, **self.about, "contenders": entries}

    def write(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_dict())


def _medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all figures, and the quartiles of the step time."""
    figures: dict[str, Any] = {}
    for name in turns[0] if turns else ():
        values = [turn[name] for turn in turns if turn[name] is not None]
        figures[name] = statistics.median(values) if values else None
    if turns:
        times = [turn["s_per_step"] for turn in turns]
        quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
        figures["s_per_step_quartiles"] = [quarters[0], quarters[2]]
    return figures


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write to a temporary file and rename it, so that a reader never sees a partial file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(target)


def read_json(path: str | os.PathLike, what: str, remedy: str) -> Any:
    """What is in a JSON file; a ConfigError if it does not exist or cannot be read."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"the {what} {path} does not exist; {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error}") from None


def read_result(path: str | os.PathLike) -> dict[str, Any]:
    """A result that bench wrote; a ConfigError for anything else."""
    result = read_json(path, "result", "`accel-commhooks bench` writes one")
    if not isinstance(result, dict) or "contenders" not in result:
        raise ConfigError(f"{path} must be a result of `accel-commhooks bench`, but has no 'contenders'")
    return result


def _command() -> str:
    """The command line, without the paths of this machine."""
    program = Path(sys.argv[0])
    ours = program.name == "__main__.py" and program.parents[1].name == "accel_commhooks"
    words = ["-m", f"accel_commhooks.{program.parent.name}"] if ours else [program.name]
    return shlex.join(["python", *words, *sys.argv[1:]])


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "accelerate", "transformers", "accel-commhooks"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine(device: torch.device) -> str:
    """The processor or accelerator, in words."""
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}"
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


# The table.

COLUMNS = (
    "hook",
    "s/step",
    "quartiles",
    "x noop",
    "x allreduce",
    "blocked s",
    "MB in node",
    "MB between",
    "opt. MB",
    "peak MB",
    "tokens/s",
)


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table's cells; an unknown figure is a dash, bytes read from the network card have a tilde."""
    table = []
    for entry in result["contenders"]:
        if "s_per_step" not in entry:
            reason = f"cannot run here: {entry['error']}" if "error" in entry else "not measured"
            table.append([entry["label"], reason, *[""] * (len(COLUMNS) - 2)])
            continue
        low, high = entry["s_per_step_quartiles"]
        table.append(
            [
                entry["label"],
                f"{entry['s_per_step']:.3f}",
                f"{low:.3f}-{high:.3f}",
                _number(entry.get("times_noop"), 2),
                _number(entry.get("times_allreduce"), 2),
                _number(entry["blocked_s"], 3),
                _bytes(entry, "within"),
                _bytes(entry, "between"),
                _number(entry["optimizer_state_mb"], 1),
                _number(entry["peak_memory_mb"], 0),
                _number(entry["tokens_per_s"], 0),
            ]
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bytes(entry: dict[str, Any], scope: str) -> str:
    counted = entry[f"mb_{scope}"]
    return f"~{entry[f'card_mb_{scope}']:.2f}" if counted is None else f"{counted:.2f}"


def heading(result: dict[str, Any]) -> str:
    rounds = max((len(entry.get("turns", [])) for entry in result["contenders"]), default=0)
    return (
        f"{result['model']}, {result['parameters'] / 1e6:.1f}M parameters, {result['ranks']} ranks on {result['nodes']} "
        f"node{'s' if result['nodes'] > 1 else ''}, batch {result['batch']} x {result['seq']}/rank; medians of "
        f"{rounds} interleaved rounds of at most {result['steps']} steps"
    )


def print_table(result: dict[str, Any]) -> None:
    table = [list(COLUMNS), *rows(result)]
    errors = {index for index, row in enumerate(table) if row[2] == "" and index}
    widths = [max(len(row[i]) for n, row in enumerate(table) if n not in errors or i == 0) for i in range(len(COLUMNS))]
    print(heading(result))
    print("MB are sent by a node in a step; ~ was read from its network devices, all else was counted.\n")
    for index, row in enumerate(table):
        if index in errors:
            print(f"{row[0]:{widths[0]}}  {row[1]}")
        else:
            print("  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip())


def markdown_table(result: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows(result):
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    return "\n".join(lines)

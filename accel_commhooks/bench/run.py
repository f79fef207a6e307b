"""Measures hooks against each other on whatever this is launched on.

``accelerate launch ... -m accel_commhooks.bench --hooks noop,allreduce,configs/powersgd.yaml``, or ``accel-commhooks
bench`` for the ranks of one machine.

Machines are noisy, so the contenders take turns in rounds within one run, and medians and quartiles of the rounds are
reported. Every contender has its own model. A turn begins with untimed steps, so that overlapped communication is already
under way at the first timed step. It ends with ``synchronize``, so that nothing runs on into the next contender's turn.
Turns are short, because a machine's speed drifts over tens of seconds. A slow contender takes fewer steps a turn, and one
whose turns are still long takes part in fewer rounds: it mostly waits for the link, so its times vary little.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm import process_group
from ..comm.collectives import Communicator
from ..comm.cost import Problem
from ..comm.topology import Topology
from ..config.errors import CommHookError, launched_rank, stop
from . import models, probes
from .contenders import STEPS_TO_START, Contender, Trial, make_optimizer, parse_hooks
from .models import Batch, Workload
from .predict import predict
from .ranks import open_ranks
from .report import Result, print_table

TURN_SECONDS = 2.0
"""Target length of the timed part of a turn; it is never below one cycle of the hook."""
SHARE_SECONDS = 4.0
"""A contender's share of a round: one whose turn takes k times as long takes part in every k-th round."""
FEWEST_TURNS = 3
"""The least number of turns a contender gets, however long they are, if there are as many rounds."""


@dataclass
class Bench:
    """One measurement: ``run`` fills ``result`` and writes it after every turn."""

    workload: Workload
    contenders: Sequence[Contender]
    batch: int = 8
    seq: int = 64
    steps: int = 8
    rounds: int = 9
    output: str = "bench.json"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    one_at_a_time: bool = False
    """Build a contender anew for each of its turns, for a model that fits into memory only once."""
    result: Result | None = None

    @classmethod
    def of(
        cls, parsed: argparse.Namespace, workload: Workload, contenders: Sequence[Contender], device: torch.device
    ) -> Bench:
        """From the arguments of :func:`add_arguments`."""
        sizes = (parsed.batch, parsed.seq, parsed.steps, parsed.rounds)
        return cls(workload, contenders, *sizes, parsed.output, device, parsed.one_at_a_time)

    def run(self) -> Result:
        self._comm = Communicator()
        rank, topology = self._comm.rank, self._comm.topology
        torch.manual_seed(1000 + rank)
        self._batches = [self._make_batch() for _ in range(4)]
        self._turn = 0
        example = self._make_model()
        self.result = result = Result.start(self, example, topology)
        problem = Problem.of(example, topology)
        # One-time costs of a process (lazily loaded libraries, thread pools) must not be charged to the first contender.
        self._steps(Trial(example, make_optimizer(example)), 1)
        del example
        progress = _progress(len(self.contenders) * (self.rounds + 1), rank)
        trials: dict[str, Trial | None] = {}  # None for one that is built for each turn
        steps: dict[str, int] = {}
        every: dict[str, int] = {}
        try:
            for contender in self.contenders:
                progress.set_description(f"{contender.label}: warm-up")
                trial, figures = self._prepare(contender)
                if trial is not None:
                    trials[contender.label] = self._keep(trial)
                    del trial
                    seconds = figures.pop("seconds")
                    steps[contender.label] = self._steps_a_turn(contender, seconds)
                    every[contender.label] = self._rounds_a_turn((contender.lead + steps[contender.label]) * seconds)
                result.add(contender, figures, predict(contender.config, problem) if contender.config else None)
                progress.update()
            for turn in range(self.rounds):
                for index, contender in enumerate(self.contenders):
                    # Long turns are spread over the rounds; but all take part in the first, which may be the only one.
                    if contender.label in trials and (turn == 0 or (turn + index) % every[contender.label] == 0):
                        progress.set_description(f"{contender.label}: round {turn + 1}")
                        figures = self._take_turn(trials[contender.label], contender, steps[contender.label], topology)
                        result.add_round(contender.label, figures)
                        self._save(result, rank)
                    progress.update()
            result.complete = True
            self._save(result, rank)
        finally:
            progress.close()
        return result

    def _save(self, result: Result, rank: int) -> None:
        if rank == 0:
            result.write(self.output)

    def _make_model(self) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.workload.make_model().to(self.device)

    def _make_batch(self) -> Batch:
        return {name: value.to(self.device) for name, value in self.workload.make_batch(self.batch, self.seq).items()}

    def _steps(self, trial: Trial, count: int) -> None:
        for _ in range(count):
            trial.step(self._batches[self._turn % len(self._batches)])
            self._turn += 1

    def _prepare(self, contender: Contender) -> tuple[Trial | None, dict[str, Any]]:
        """Build and warm up; returns the trial with its memory use, or the reason why it cannot run."""
        gc.collect()
        memory = probes.PeakMemory(self.device)
        trial, error, seconds = None, None, 0.0
        try:
            trial = contender.build(self._make_model())
            self._steps(trial, STEPS_TO_START)
            _wait_for_device(self.device)
            start = time.perf_counter()
            self._steps(trial, contender.cycle)
            trial.drain()
            _wait_for_device(self.device)
            seconds = (time.perf_counter() - start) / contender.cycle
        except Exception as problem:
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        mine = {
            "error": error,
            "peak": memory.read(),
            "state": probes.state_bytes(trial.optimizer) if trial else 0,
            "seconds": seconds,
        }
        everyone = self._comm.gather_objects(mine)
        errors = [answer["error"] for answer in everyone if answer["error"]]
        if errors:
            return None, {"error": errors[0]}
        return trial, {name: max(answer[name] for answer in everyone) for name in ("peak", "state", "seconds")}

    def _keep(self, trial: Trial) -> Trial | None:
        """The trial until its next turn, or None where it is built anew for that."""
        if not self.one_at_a_time:
            return trial
        trial.close()
        return None

    def _take_turn(self, kept: Trial | None, contender: Contender, steps: int, topology: Topology) -> dict[str, Any]:
        trial, prepared = (kept, {}) if kept is not None else self._prepare(contender)
        if trial is None:
            raise CommHookError(f"{contender.label} was built for its warm-up and not again: {prepared['error']}")
        figures = self._measure(trial, contender, steps, topology)
        self._keep(trial)
        return figures

    def _steps_a_turn(self, contender: Contender, seconds: float) -> int:
        """Whole cycles; ``seconds`` is what a step took on the slowest rank, so all ranks compute the same number."""
        wanted = min(self.steps, math.ceil(TURN_SECONDS / seconds))
        return contender.cycle * -(-wanted // contender.cycle)

    def _rounds_a_turn(self, seconds: float) -> int:
        return max(1, min(math.ceil(seconds / SHARE_SECONDS), self.rounds // FEWEST_TURNS))

    def _measure(self, trial: Trial, contender: Contender, steps: int, topology: Topology) -> dict[str, Any]:
        self._steps(trial, contender.lead)
        _wait_for_device(self.device)
        before = probes.Counters.read(trial.handle)
        start = time.perf_counter()
        self._steps(trial, steps)
        _wait_for_device(self.device)
        seconds = (time.perf_counter() - start) / steps
        counted = probes.Counters.read(trial.handle) - before
        trial.drain()
        everyone = self._comm.gather_objects((seconds, counted))
        return probes.summary(everyone, topology, steps) | {
            "tokens_per_s": self._comm.size * self.batch * self.seq / max(answer[0] for answer in everyone)
        }


def _wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Silence:
    """Stands in for the progress bar on all ranks but the first, and where tqdm is not installed."""

    def set_description(self, text: str) -> None: ...
    def update(self) -> None: ...
    def close(self) -> None: ...


def _progress(total: int, rank: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _Silence()
    return tqdm(total=total, file=sys.stderr, leave=False, disable=None) if rank == 0 else _Silence()


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hooks", help="comma-separated: names, YAML files, name{option: value, ...}, ddp")
    parser.add_argument("--model", help="a Transformers name (bert, gpt2, ...) or module:function; built in otherwise")
    parser.add_argument("--params", default="14M", help="size of the built-in model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps per turn, fewer if slow (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds; slow hooks skip some of them (default: %(default)s)",
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="keep one hook's model in memory instead of all, and build it anew for each turn",
    )
    parser.add_argument("--output", default="bench.json", help="where the result goes (default: %(default)s)")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m accel_commhooks.bench", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parsed = parser.parse_args(None if arguments is None else list(arguments))
    try:
        contenders = parse_hooks(parsed.hooks)
        workload = models.load(parsed.model, parsed.params)
        device = open_ranks()
    except CommHookError as error:
        stop(error)
    bench = Bench.of(parsed, workload, contenders, device)
    try:
        bench.run()
    except KeyboardInterrupt:
        _report(bench)
        sys.stdout.flush()
        os._exit(130)  # the other ranks were interrupted too, and a clean exit would wait for their collectives
    _report(bench)
    process_group.leave()
    return 0


def _report(bench: Bench) -> None:
    if launched_rank() == 0 and bench.result is not None:
        bench.result.write(bench.output)
        print_table(bench.result.to_dict())
        print(f"\nwritten to {bench.output}" + ("" if bench.result.complete else ", incomplete: interrupted"))

"""Measures hooks against each other on whatever this is launched on.

``accelerate launch ... -m accel_commhooks.bench --hooks noop,allreduce,configs/powersgd.yaml``, or ``accel-commhooks
bench`` for the ranks of one machine.

Machines are noisy, so the contenders take turns in rounds within one run, and medians and spreads of the rounds are
reported. Every contender keeps a model of its own. A turn begins with untimed steps, so that what is under way from the step
before is under way at the first timed step as at any other; it ends with ``synchronize``, so that nothing runs on into the
next contender's turn. Turns are short, because a machine is slow or fast for a while. One that is slow takes fewer steps,
and one whose turn is long nevertheless sits out rounds: it mostly waits for the link, which scatters little, and a run
should end.
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
import torch.distributed as dist

from ..comm import cost
from ..comm.topology import Topology, host_key
from ..config.errors import CommHookError, ConfigError
from ..ways_in.launch import stop
from . import models, probes
from .contenders import STEPS_TO_START, Contender, Trial, make_optimizer, parse_hooks
from .models import Batch, Workload
from .report import Result, print_table

TURN_SECONDS = 2.0
"""The timed part of a turn is cut to about so long, but never below one cycle of the hook."""
SHARE_SECONDS = 4.0
"""Of a round, for one contender: a turn that takes k times as long is taken every k-th round."""
FEWEST_TURNS = 3
"""However long they are, if there are as many rounds."""


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
    result: Result | None = None

    def run(self) -> Result:
        rank = dist.get_rank()
        topology = _topology()
        torch.manual_seed(1000 + rank)
        self._batches = [self._make_batch() for _ in range(4)]
        self._turn = 0
        example = self._make_model()
        self.result = result = Result.start(self, example, topology)
        problem = cost.Problem.of(example, topology)
        # What a process pays once (libraries that load late, thread pools) must not be the first contender's.
        self._steps(Trial(example, make_optimizer(example)), 1)
        del example
        progress = _progress(len(self.contenders) * (self.rounds + 1), rank)
        trials: dict[str, Trial] = {}
        steps: dict[str, int] = {}
        every: dict[str, int] = {}
        try:
            for contender in self.contenders:
                progress.set_description(f"{contender.label}: warm-up")
                trial, figures = self._prepare(contender)
                if trial is not None:
                    trials[contender.label] = trial
                    seconds = figures.pop("seconds")
                    steps[contender.label] = self._steps_a_turn(contender, seconds)
                    every[contender.label] = self._rounds_a_turn((contender.lead + steps[contender.label]) * seconds)
                result.add(contender, figures, cost.predict(contender.config, problem) if contender.config else None)
                progress.update()
            for turn in range(self.rounds):
                for index, contender in enumerate(self.contenders):
                    # Not all long ones in the same rounds; but all in the first, which may be the only one.
                    if contender.label in trials and (turn == 0 or (turn + index) % every[contender.label] == 0):
                        progress.set_description(f"{contender.label}: round {turn + 1}")
                        figures = self._measure(trials[contender.label], contender, steps[contender.label], topology)
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
        """Build and warm up, with the memory that takes; or the reason why it cannot."""
        gc.collect()
        memory = probes.PeakMemory(self.device)
        trial, error, seconds = None, None, 0.0
        try:
            trial = contender.build(self._make_model())
            self._steps(trial, STEPS_TO_START)
            start = time.perf_counter()
            self._steps(trial, contender.cycle)
            trial.drain()
            seconds = (time.perf_counter() - start) / contender.cycle
        except Exception as problem:
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        mine = {
            "error": error,
            "peak": memory.read(),
            "state": probes.state_bytes(trial.optimizer) if trial else 0,
            "seconds": seconds,
        }
        everyone = _gather(mine)
        errors = [answer["error"] for answer in everyone if answer["error"]]
        if errors:
            return None, {"error": errors[0]}
        return trial, {name: max(answer[name] for answer in everyone) for name in ("peak", "state", "seconds")}

    def _steps_a_turn(self, contender: Contender, seconds: float) -> int:
        """Whole cycles; ``seconds`` is what a step took on the slowest rank, so all ranks come to the same number."""
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
        everyone = _gather((seconds, counted))
        return probes.summary(everyone, topology, steps) | {
            "tokens_per_s": dist.get_world_size() * self.batch * self.seq / max(answer[0] for answer in everyone)
        }


def _gather(value: Any) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return answers


def _topology() -> Topology:
    return Topology.from_keys(_gather(host_key()))


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
    parser.add_argument("--hooks", help="names, YAML files, name{option: value, ...} or ddp, with commas in between")
    parser.add_argument("--model", help="a Transformers name (bert, gpt2, ...) or module:function; built in otherwise")
    parser.add_argument("--params", default="14M", help="size of the built-in model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps a turn, fewer if it is long (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds; hooks whose turns are long sit out some of them (default: %(default)s)",
    )
    parser.add_argument("--output", default="bench.json", help="where the result goes (default: %(default)s)")


def open_ranks() -> torch.device:
    """Join the process group that the launcher described, and say which device is this rank's."""
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available())
    if not dist.is_initialized():
        raise ConfigError(
            "bench needs at least two processes; start it with `accelerate launch --num_processes 2 -m "
            "accel_commhooks.bench`, or with `accel-commhooks bench`"
        )
    return state.device if state.device.type != "cpu" else torch.device("cpu")


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
    bench = Bench(workload, contenders, parsed.batch, parsed.seq, parsed.steps, parsed.rounds, parsed.output, device)
    try:
        bench.run()
    except KeyboardInterrupt:
        _report(bench)
        sys.stdout.flush()
        os._exit(130)  # the others are gone too, perhaps in the middle of a collective that would be waited for
    _report(bench)
    dist.barrier()  # who holds the store must not leave before the others
    dist.destroy_process_group()
    return 0


def _report(bench: Bench) -> None:
    if dist.get_rank() == 0 and bench.result is not None:
        bench.result.write(bench.output)
        print_table(bench.result.to_dict())
        print(f"\nwritten to {bench.output}" + ("" if bench.result.complete else ", incomplete: interrupted"))

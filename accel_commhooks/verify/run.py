"""Proves, on whatever it is launched on, that the hooks work there: what a GPU user runs first.

``accelerate launch ... -m accel_commhooks.verify``, or ``accel-commhooks verify`` for the ranks of one machine. Every check
runs for every hook, with a small built-in model, on the devices and the backend at hand, with random delays on every rank.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch

from ..bench.contenders import parse_hook, split_hooks
from ..bench.ranks import open_ranks
from ..comm import process_group
from ..comm.collectives import Communicator
from ..config.config import CommHookConfig
from ..config.errors import CommHookError, ConfigError, described, launched_rank, let_rank_0_speak, nearest, shown, stop
from ..config.registry import available_hooks
from . import surroundings
from .case import Case, failed
from .checks import CHECKS, agree, run_check
from .report import Report

GRACE_SECONDS = 20.0
"""Beyond the timeout of collectives: a check that takes longer waits for something that is no collective."""
_runs = itertools.count(1)


def verify(
    hooks: Sequence[str | CommHookConfig] | None = None,
    device: torch.device | str = "cpu",
    *,
    checks: Sequence[str] | None = None,
    seed: int = 0,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the checks inside the process group of this process. Every rank calls it, with the same arguments.

    ``hooks`` are names or configs, all that are available if left out; ``on_progress`` is called before every check.
    """
    started = time.perf_counter()
    device, comm = torch.device(device), Communicator()
    run = comm.gather_objects(next(_runs))[0]  # a rank may have been in fewer groups than rank 0
    sources = list(hooks) if hooks is not None else available_hooks()
    cases = [Case.make(source, comm, device, seed) for source in sources]
    report = Report([case.label for case in cases], list(checks or CHECKS))
    report.running = "the link"
    on_progress(report)
    report.about = surroundings.describe(comm, device)
    for case, name in itertools.product(cases, report.checks):
        began = time.perf_counter()
        report.running = f"{name} of {case.label}"
        report.seconds = began - started
        on_progress(report)
        outcome, error = run_check(CHECKS[name], case)
        outcome, report.stopped = agree(comm, f"verify {run}: {report.running}", outcome, error)
        report.add(case.label, name, outcome, time.perf_counter() - began)
        if report.stopped is not None:
            break
    report.running = None
    report.seconds = time.perf_counter() - started
    return report


class Watchdog:
    """Ends this process when a check takes too long: one that waits for a Future, which has no timeout, never returns."""

    def __init__(self, limit: float, output: str):
        self._limit, self._output = limit, output
        self._timer: threading.Timer | None = None

    def restart(self, report: Report) -> None:
        self.stop()
        self._timer = threading.Timer(self._limit, self._end, [report])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, report: Report) -> None:
        let_rank_0_speak()
        running, report.running = report.running, None
        report.stopped = (
            f"a check must end within {self._limit:g} s, but '{running}' did not on rank {launched_rank()}; does a bucket's "
            "Future stay without a result? With a slow link, rerun with a longer --timeout"
        )
        check, _, hook = (running or "").partition(" of ")
        if hook:
            report.add(hook, check, failed(f"it did not end within {self._limit:g} s"), self._limit)
        _leave_at_once(report, self._output)


def _leave_at_once(report: Report, output: str) -> None:
    """Ranks are out of step: a clean exit would wait for their collectives."""
    let_rank_0_speak()
    if launched_rank() == 0:
        _show(report, output)
    sys.stdout.flush()
    os._exit(1)


def _show(report: Report, output: str) -> None:
    report.write(output)
    print(f"{report.text()}\nwritten to {output}", flush=True)


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hooks", help="comma-separated: names, YAML files, name{option: value, ...} (default: all)")
    parser.add_argument("--checks", help="comma-separated names of checks (default: all)")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds a collective may take (default: %(default)s)"
    )
    parser.add_argument("--output", default="verify.json", help="where the report goes (default: %(default)s)")


def list_checks() -> str:
    width = max(map(len, CHECKS))
    return "\n".join(
        f"{name:{width}}  {(inspect.getdoc(check) or '').splitlines()[0]}" for name, check in CHECKS.items()
    )


def parse(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Hooks and checks, before any rank is started; a ConfigError for a name that does not exist."""
    hooks = split_hooks(arguments.hooks) if arguments.hooks else available_hooks()
    for hook in hooks:
        parse_hook(hook).build_options()
    checks = [name.strip() for name in arguments.checks.split(",")] if arguments.checks else list(CHECKS)
    for name in checks:
        if name not in CHECKS:
            raise ConfigError(
                f"there is no check named {shown(name)}{nearest(name, CHECKS)}; `accel-commhooks verify --list` lists them"
            )
    if arguments.timeout <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, but got {arguments.timeout:g}; leave it out for 60")
    for what, names in (("hook", hooks), ("check", checks)):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"every {what} may be named once, but got {', '.join(twice)} twice")
    return hooks, checks


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m accel_commhooks.verify", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parsed = parser.parse_args(None if arguments is None else list(arguments))
    if parsed.list:
        print(list_checks())
        return 0
    try:
        hooks, checks = parse(parsed)
        device = open_ranks("verify", timeout=timedelta(seconds=parsed.timeout))
    except CommHookError as error:
        stop(error)
    gc.freeze()  # every attach and detach collects garbage; what was imported is none, and takes half of that time
    watchdog = Watchdog(parsed.timeout + GRACE_SECONDS, parsed.output)

    def on_progress(report: Report) -> None:
        watchdog.restart(report)
        if launched_rank() == 0:
            report.write(parsed.output)
            print(f"verify: {report.running}", file=sys.stderr, flush=True)

    try:
        report = verify(hooks, device, checks=checks, on_progress=on_progress)
    except CommHookError as error:
        stop(error)
    except Exception as error:
        let_rank_0_speak()
        print(f"accel-commhooks: verify was stopped on rank {launched_rank()}: {described(error)}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    watchdog.stop()
    if report.stopped is not None:
        _leave_at_once(report, parsed.output)
    if launched_rank() == 0:
        _show(report, parsed.output)
    process_group.leave()
    return 0 if report.passed else 1

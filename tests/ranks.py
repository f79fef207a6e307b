"""A pool of ranks, started once: importing torch is paid once, a test function is fed to as many as it wants.

``pool.run(function, world_size, *args)`` calls ``function(rank, world_size, *args)`` in that many processes, inside a
fresh process group, and returns their results by rank. A rank's own traceback is in the error; a rank that does not answer
in time is shown with its stack, and the pool starts afresh.

Ranks use Gloo on the CPU unless ``pytest --backend`` and ``--device`` say otherwise (:class:`Setting`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

DEVICE_VARIABLE = "RANKS_DEVICE"
"""The name of the device on which a rank's models and data are; see ``models.device``."""


@dataclass(frozen=True)
class Setting:
    """Where the ranks run, and how."""

    backend: str = "gloo"
    device: str = "cpu"
    backward_thread: bool = False
    """Run backward on a thread of its own, as torch does for models on an accelerator."""

    def problem(self) -> str | None:
        """What this machine lacks; None if nothing."""
        import torch
        import torch.distributed as dist

        if self.device == "cpu":
            return None if self.backend in ("gloo", "late") else f"--backend {self.backend} needs --device"
        found = str(torch.accelerator.current_accelerator() or "cpu")
        if found != self.device:
            return f"it needs at least 2 devices of type {self.device}, one for each rank, but this machine has {found} only"
        if self.devices() < 2:
            return f"it needs at least 2 devices of type {self.device}, one for each rank, but this machine has {self.devices()}"
        if not dist.is_backend_available(self.backend):
            return f"it needs torch built with the backend {self.backend}"
        return None

    def devices(self) -> int:
        import torch

        return torch.accelerator.device_count()


class RankError(AssertionError):
    pass


def _serve(connection, stack_file: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _start_coverage()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stacks = open(stack_file, "w")  # noqa: SIM115 - open as long as the process lives
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        function, rank, world_size, store, args, timeout, environment, expendable, setting = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), **environment)
        faulthandler.dump_traceback_later(timeout, file=stacks)
        try:
            torch.manual_seed(0)
            _prepare(setting, rank)
            # A rank that is done at once would leave while others still connect to it.
            with mock.patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"):
                dist.init_process_group(
                    setting.backend, init_method=f"file://{store}", rank=rank, world_size=world_size
                )
            answer = ("ok", function(rank, world_size, *args), _issued(setting))
        except BaseException:
            answer = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        _save_coverage()
        connection.send(answer)
        while expendable:
            time.sleep(1)  # keep the group as it is until all ranks have answered and are killed
        del task, function, args, answer
        gc.collect()  # models go before the group they use
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        for name in environment:
            os.environ.pop(name, None)


def _start_coverage() -> None:
    """Measure what runs in a rank, where `make late` asks for it."""
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.process_startup()


def _save_coverage() -> None:
    """After each test, as ranks are killed in the end."""
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
        measured.save()


def _prepare(setting: Setting, rank: int) -> None:
    """Before a rank joins its group."""
    import torch

    os.environ[DEVICE_VARIABLE] = setting.device
    if setting.backend == "late":
        import late_group

        late_group.register()
    if setting.device != "cpu":
        index = rank % torch.accelerator.device_count()
        os.environ[DEVICE_VARIABLE] = f"{setting.device}:{index}"
        torch.accelerator.set_device_index(index)
    if setting.backward_thread:
        import backward_thread

        backward_thread.install()


def _issued(setting: Setting) -> list:
    """After a test: raises the races that were found; what was issued, to be compared between ranks."""
    if setting.backend != "late":
        return []
    import late_group

    return late_group.finish()


class RankPool:
    def __init__(self, size: int = 4, setting: Setting = Setting()):  # noqa: B008 - it is frozen
        self.size = size
        self.setting = setting
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self._stores = 0
        self._processes: list = []
        self._connections: list = []

    def _start(self, count: int) -> None:
        while len(self._processes) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, self._stack_file(len(self._processes))), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stack_{rank}")

    def run(
        self,
        function,
        world_size: int = 2,
        *args,
        timeout: float = 120,
        environment: dict | None = None,
        expendable: bool = False,
    ) -> list:
        """``expendable`` replaces the ranks afterwards.

        For torch's PowerSGD: its callbacks hold the process group, so that one of Gloo's own threads may be the last to
        let go of it. That thread then waits for itself, and the process aborts ("Resource deadlock avoided").
        """
        if self.setting.device != "cpu" and world_size > self.setting.devices():
            import pytest

            pytest.skip(f"{world_size} ranks need as many devices, and there are {self.setting.devices()}")
        self._start(world_size)
        self._stores += 1
        store = str(Path(self._folder.name) / f"store_{self._stores}")
        for rank in range(world_size):
            task = (
                function, rank, world_size, store, args, timeout * 0.9, environment or {}, expendable, self.setting
            )  # fmt: skip
            self._connections[rank].send(task)
        answers: list = [None] * world_size
        deadline = time.monotonic() + timeout
        for rank in range(world_size):
            with contextlib.suppress(EOFError, ConnectionResetError):
                if self._connections[rank].poll(max(0.0, deadline - time.monotonic())):
                    answers[rank] = self._connections[rank].recv()
            if answers[rank] is not None and answers[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + 3)  # the others may wait for this one for ever
        if any(answer is None or answer[0] != "ok" for answer in answers):
            report = "\n".join(self._report(rank, answer) for rank, answer in enumerate(answers))
            self.stop()
            raise RankError(report)
        if expendable:
            self.stop()
        if self.setting.backend == "late":
            import late_group

            late_group.compare_orders([answer[2] for answer in answers])
        return [answer[1] for answer in answers]

    def _report(self, rank: int, answer) -> str:
        if answer is None:
            return f"--- rank {rank} did not answer; its stack:\n{Path(self._stack_file(rank)).read_text()}"
        return f"--- rank {rank} {answer[0]}\n{answer[1] if answer[0] == 'error' else ''}"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

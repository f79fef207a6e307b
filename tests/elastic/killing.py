"""A run under torchrun, with ranks killed at times drawn beforehand."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .subjects import Subject

RANKS = 2
SECONDS_A_STEP = 0.2
"""At least."""
PATIENCE = 300.0
"""Seconds for a start, a restart or a save."""
DURING_A_SAVE = 0.06
"""Seconds from its first file within which a kill comes; a save takes about that long."""


class Stuck(Exception):
    """Something did not happen in time."""


@dataclass(frozen=True)
class Kill:
    seconds: float
    """After the first step of the attempt."""
    rank: int
    into_save: float | None
    """If it is to come during a save: seconds after the next one has begun."""


@dataclass
class Outcome:
    code: int
    kills: int
    in_saves: int
    restarts: int
    output: str


def draw_kills(count: int, seed: int) -> list[Kill]:
    draw = random.Random(seed)
    return [
        Kill(
            seconds=draw.uniform(0.5, 4.0),
            rank=draw.randrange(RANKS),
            into_save=draw.uniform(0, DURING_A_SAVE) if draw.random() < 0.5 else None,
        )
        for _ in range(count)
    ]


def steps_for(kills: list[Kill]) -> int:
    """More than can be done between the kills, some tenths of a second for each of them included."""
    return 60 + round(sum(kill.seconds + 0.5 for kill in kills) / SECONDS_A_STEP)


class Run:
    """torchrun and its ranks."""

    def __init__(self, subject: Subject, shared: Path, out: Path, steps: int, restarts: int):
        self.subject, self.out = subject, out
        out.mkdir(parents=True)
        self.text = shared / f"{out.name}.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
        command += ["--max-restarts", restarts, *subject.arguments(shared, out, steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Otherwise torchrun keeps one store for all attempts, in which ranks find addresses of the attempt before.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        path = [str(Path(__file__).parent / "pace"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PACE": str(SECONDS_A_STEP)}
        environment["HF_DATASETS_CACHE"] = str(shared / "cache")
        with self.text.open("w") as text:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=environment,
                stdout=text,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, kills: list[Kill], seconds: float) -> Outcome:
        """Carry out the kills, then wait for the end."""
        done = in_saves = attempt = 0
        try:
            for kill in kills:
                self._await_step(done)
                time.sleep(kill.seconds)
                if kill.into_save is not None:
                    self._await_save()
                    time.sleep(kill.into_save)
                ranks = self._ranks()
                if self.process.poll() is not None or kill.rank not in ranks:
                    break  # it has come to its end
                pid, attempt = ranks[kill.rank]
                os.kill(pid, signal.SIGKILL)
                done, in_saves = attempt + 1, in_saves + (kill.into_save is not None)
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Stuck(f"no end after {seconds:.0f} s\n{self.text.read_text()[-3000:]}") from None
        finally:
            self._end()
        text = self.text.read_text()
        return Outcome(self.process.returncode, done, in_saves, attempt + 1 if done else 0, text)

    def _end(self) -> None:
        """Leave nothing behind; torchrun gives every rank a session of its own."""
        if self.process.poll() is None:
            ranks = self._ranks().values()
            self.process.kill()
            self.process.wait()
            for pid, _ in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ranks(self) -> dict[int, tuple[int, int]]:
        """(process, restarts before this attempt) of the ranks that are there, by rank."""
        found = {}
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in _read(children).split():
                environment = _read(Path(f"/proc/{pid.decode()}/environ")).split(b"\0")
                values = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
                if b"RANK" in values and b"TORCHELASTIC_RESTART_COUNT" in values:
                    found[int(values[b"RANK"])] = (int(pid), int(values[b"TORCHELASTIC_RESTART_COUNT"]))
        return found

    def _await_step(self, attempt: int) -> None:
        """Until this attempt has taken a step: the log has become longer since its ranks have been there."""
        self._await(lambda: [a for _, a in self._ranks().values()] == [attempt] * RANKS, f"attempt {attempt}")
        log, sizes = self.out / self.subject.log, [float("inf")]

        def grown() -> bool:
            sizes.append(log.stat().st_size if log.exists() else 0)
            return sizes[-1] > sizes[-2]

        self._await(grown, f"a step of attempt {attempt}")

    def _await_save(self) -> None:
        before = self._written()
        self._await(lambda: bool(self._written() - before), "a save")

    def _written(self) -> set[tuple[str, int]]:
        written = set()
        for folder in self.out.glob(self.subject.saves):
            for path in [folder, *folder.rglob("*")]:
                try:
                    written.add((str(path), path.stat().st_mtime_ns))
                except FileNotFoundError:
                    continue  # renamed or deleted meanwhile
        return written

    def _await(self, condition, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                return
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come\n{self.text.read_text()[-3000:]}")
            time.sleep(0.01)


def _read(file: Path) -> bytes:
    """A file of /proc, empty if what it is about has just ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""

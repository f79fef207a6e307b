"""Faults in a forked rank, at named places. The package has no hooks for tests: methods are replaced in the rank only.

A place is a text such as ``train: between all_reduce``: the phase of the script, and where in it. The same places are
passed in every run of a script, so an undisturbed run tells how often each rank passes each of them, and a strike says at
which passage it strikes.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import PlantedFailure

from accel_commhooks.attachment import rank_files
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.comm.pending import PendingCollective
from accel_commhooks.comm.roll_call import RollCall
from accel_commhooks.hooks.local_sgd.averaging import Exchange
from accel_commhooks.hooks.zero.gathering import ParameterGather

from .server import Note

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "maximum", "reduce_to_owners")
STRUCK_PHASES = ("attach", "train", "save")


@dataclass(frozen=True)
class Strike:
    """``how`` it happens: kill, stop, raise, or slow by some seconds; on one rank, at one passage of one place."""

    how: str
    rank: int
    place: str
    passage: int
    seconds: float = 0.0


class Injector:
    """Counts the passages of a rank, and strikes."""

    def __init__(self, rank: int, strike: Strike | None, note: Note):
        self._rank, self._strike, self._note = rank, strike, note
        self.phase = "start"
        self.passages: Counter[str] = Counter()

    def reach(self, where: str) -> None:
        """The rank is at a place."""
        place, strike = f"{self.phase}: {where}", self._strike
        passage, self.passages[place] = self.passages[place], self.passages[place] + 1
        if strike is None or (strike.rank, strike.place, strike.passage) != (self._rank, place, passage):
            return
        self._note("struck", time.monotonic())
        if strike.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif strike.how == "raise":
            raise PlantedFailure(f"planted at {place}")
        else:
            time.sleep(strike.seconds)

    def struck_passages(self) -> dict[str, int]:
        """Of the phases in which faults may strike."""
        return {place: count for place, count in self.passages.items() if place.startswith(STRUCK_PHASES)}

    def install(self) -> None:
        """For the rest of this process."""
        for kind in COLLECTIVES:
            self._around_collective(kind)
        real_wait = PendingCollective.wait

        def wait(pending: PendingCollective) -> torch.Tensor:
            kind = pending.__dict__.pop("fault_kind", None)
            if kind is None:
                return real_wait(pending)
            self.reach(f"between {kind}")
            result = real_wait(pending)
            self.reach(f"after {kind}")
            return result

        PendingCollective.wait = wait  # type: ignore[method-assign]
        self._around(Communicator, "gather_objects")
        self._around(Communicator, "subgroup")
        self._around(RollCall, "answer")
        self._around(RollCall, "everyone")
        for name in ("_send", "_receive", "advance"):
            self._around(Exchange, name)
        self._around(ParameterGather, "start", "the gather of parameters")
        self._in_a_save()

    def _around_collective(self, kind: str) -> None:
        real = getattr(Communicator, kind)

        def collective(comm: Communicator, *args: Any, **kwargs: Any) -> PendingCollective:
            self.reach(f"before {kind}")
            pending = real(comm, *args, **kwargs)
            pending.fault_kind = kind
            return pending

        setattr(Communicator, kind, collective)

    def _around(self, owner: Any, method: str, name: str | None = None) -> None:
        real: Callable = getattr(owner, method)
        name = name or f"{owner.__name__.rpartition('.')[2]}.{method}"

        def passing(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = real(*args, **kwargs)
            self.reach(f"after {name}")
            return result

        setattr(owner, method, passing)

    def _in_a_save(self) -> None:
        """Before and after the file is written, in its middle, between the two renames, and before .old is removed."""
        for method in ("write", "_write_aside", "_take_its_place"):
            self._around(rank_files, method)
        real_save, real_replace, real_unlink = torch.save, Path.replace, Path.unlink

        def save(content: Any, stream: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(stream, io.BufferedWriter):  # a tensor that is pickled to be sent
                real_save(content, stream, *args, **kwargs)
                return
            whole = io.BytesIO()
            real_save(content, whole)
            half = len(whole.getvalue()) // 2
            stream.write(whole.getvalue()[:half])
            stream.flush()
            self.reach("in the middle of the file")
            stream.write(whole.getvalue()[half:])

        def replace(path: Path, target: Path) -> Path:
            result = real_replace(path, target)
            if str(target).endswith(".old"):
                self.reach("between the renames")
            return result

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if path.name.endswith(".old"):
                self.reach("before .old is removed")
            real_unlink(path, missing_ok=missing_ok)

        torch.save, Path.replace, Path.unlink = save, replace, unlink  # type: ignore[method-assign]

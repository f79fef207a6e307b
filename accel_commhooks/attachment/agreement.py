"""Agreement at attach: every rank tells what it is about to do, and a difference is an error on all ranks.

It goes through the store of the process group (comm/roll_call.py), before anything collective: ranks with different hooks
would meet in different collectives, and a rank without a hook in none. What is known of a rank that does not come:

- it has refused: its error is shown by all;
- it runs a forward of its model without a hook, or it did not even have this package when it built its model: it is given
  ABSENT_SECONDS, because it may attach late;
- it has built its model with this package in use: it is slow, and waited for as long as for a collective.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel  # noqa: TID251 - attachment may use DDP

from ..comm.process_group import ProcessGroup
from ..comm.roll_call import RollCall, named
from ..comm.topology import host_key
from ..config.errors import CompatibilityError
from ..upstream import seams
from ..upstream.compiling import eager
from . import fingerprint
from .discovery import DDPWatch
from .fingerprint import Fingerprint
from .outputs import tensors_in
from .slot import attachment_of

Describe = Callable[[bool], Fingerprint]
"""This rank's fingerprint; called with True, garbage is collected before."""
GiveUp = Callable[[list[int], float], None]

ABSENT_SECONDS = 8.0
REMEDY = "give every rank the same config, script and package, and attach on every rank"


@dataclass(frozen=True)
class Agreement:
    """What a roll call has found out."""

    hosts: list[str] | None
    """A text for each rank that is equal on ranks of one node; None where ranks could not be asked."""
    run: str
    """A name for this run, the same on every rank."""


class _Presence(DDPWatch):
    """Numbers the DDP models of each process group, and lets the other ranks know that this one has built them.

    DDP is built by all ranks together, so a model has the same number on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._built: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._attached: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._unhooked: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()

    def found(self, ddp: torch.nn.Module, module: torch.nn.Module) -> None:
        group = _group_of(ddp)
        number = self._built[group] = self._built.get(group, 0) + 1
        self._numbers[ddp] = number
        with contextlib.suppress(RuntimeError):  # a script that uses no hook must not fail for this
            RollCall(group, f"model {number} built").answer({})
        handle = ddp.register_forward_hook(eager(self._forward_without_hook))
        self._unhooked[ddp] = (handle, seams.keep_copies_plain(ddp, [handle]))

    def number(self, ddp: torch.nn.Module) -> int:
        """Of a model that was built before this package was imported: 0."""
        return self._numbers.get(ddp, 0)

    def attaching(self, ddp: torch.nn.Module) -> str:
        """A hook is being attached; returns a name for this event that is the same on every rank."""
        self._stop_watching(ddp)
        self._attached[ddp] = self._attached.get(ddp, 0) + 1
        return f"model {self.number(ddp)} attach {self._attached[ddp]}"

    def _stop_watching(self, ddp: torch.nn.Module) -> None:
        if ddp in self._unhooked:
            handle, end_plain_copies = self._unhooked.pop(ddp)
            handle.remove()
            end_plain_copies()

    def _forward_without_hook(self, ddp: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._stop_watching(ddp)
        if attachment_of(ddp) is not None:
            return
        call = RollCall(_group_of(ddp), f"model {self.number(ddp)} attach 1")
        if not call.is_possible:
            return
        call.answer({"unhooked": True})
        others = [rank for rank in range(call.size) if rank != call.rank]
        reference = weakref.ref(ddp)

        def backward_without_hook(gradient: torch.Tensor) -> None:
            """The others, if they have attached a hook, wait for this rank and will say so; here it is said as well."""
            ddp = reference()
            if ddp is None or attachment_of(ddp) is not None:
                return
            told = {rank: call.answer_of(rank) for rank in others}
            hooked = [rank for rank, answer in told.items() if answer is not None and "digest" in answer]
            if hooked:
                raise CompatibilityError(_unhooked([call.rank], told[hooked[0]]["hook"]))  # type: ignore[index]

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_without_hook)
                break


presence = _Presence()


def _group_of(ddp: Any) -> ProcessGroup:
    return ddp.process_group


def _unhooked(ranks: list[int], hook: str) -> str:
    have = "has" if len(ranks) == 1 else "have"
    return f"hook '{hook}' is attached on some ranks, but {named(ranks)} {have} no hook; {REMEDY}"


def refuse(ddp: DistributedDataParallel, reason: str) -> None:
    """Tell the other ranks that this one cannot attach, and why."""
    RollCall(ddp.process_group, presence.attaching(ddp)).answer({"refusal": reason})


def agree(ddp: DistributedDataParallel, hook: str, describe: Describe) -> Agreement:
    """Compare with all ranks of the model's process group."""
    built = RollCall(ddp.process_group, f"model {presence.number(ddp)} built")

    def give_up(missing: list[int], seconds: float) -> None:
        strangers = [rank for rank in missing if built.answer_of(rank) is None]
        if strangers and seconds > ABSENT_SECONDS:
            raise CompatibilityError(_unhooked(strangers, hook))

    return compare(ddp.process_group, presence.attaching(ddp), hook, describe, give_up)


def compare(
    process_group: ProcessGroup, event: str, hook: str, describe: Describe, give_up: GiveUp | None = None
) -> Agreement:
    """Compare fingerprints; they are told as a whole only if they differ."""
    own_run = secrets.token_hex(8)
    call = RollCall(process_group, event)
    if not call.is_possible:
        return Agreement(None, own_run)
    call.answer({"digest": fingerprint.digest(describe(False)), "host": host_key(), "run": own_run, "hook": hook})
    answers = _with_patience(call, give_up, hook)
    hosts, run = [answer["host"] for answer in answers], answers[0]["run"]
    if len({answer["digest"] for answer in answers}) == 1:
        return Agreement(hosts, run)
    # Perhaps only a garbage collector has not run yet on some rank: look again, without garbage.
    again = RollCall(process_group, f"{event} again")
    own = describe(True)
    again.answer({"digest": fingerprint.digest(own)})
    digests = [answer["digest"] for answer in again.everyone("compare")]
    if texts := _differences(RollCall(process_group, f"{event} details"), own, digests):
        raise CompatibilityError(
            f"hook '{hook}' cannot be attached, because the ranks differ: {fingerprint.summary(texts)}; {REMEDY}"
        )
    return Agreement(hosts, run)


def _differences(call: RollCall, own: Fingerprint, digests: list[str]) -> list[str]:
    """Only one rank of each kind is asked for its whole fingerprint: there may be many ranks and long models."""
    representatives = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    if call.rank in representatives.values():
        call.answer(own)
    of_kind = {digest: call.wait_for(rank) for digest, rank in representatives.items()}
    return fingerprint.differences({rank: of_kind[digest] for rank, digest in enumerate(digests)})


def _with_patience(call: RollCall, give_up: GiveUp | None, hook: str) -> list[dict[str, Any]]:
    """All answers. A rank that runs forwards without a hook may attach before its first backward."""
    waited = 0.0
    while True:
        answers = call.everyone("attach a hook", give_up)
        refusals = {rank: answer["refusal"] for rank, answer in enumerate(answers) if "refusal" in answer}
        if refusals:
            rank = min(refusals)
            raise CompatibilityError(f"hook '{hook}' cannot be attached: rank {rank} has refused it: {refusals[rank]}")
        unhooked = [rank for rank, answer in enumerate(answers) if "unhooked" in answer]
        if not unhooked:
            return answers
        if waited > ABSENT_SECONDS:
            raise CompatibilityError(_unhooked(unhooked, hook))
        waited += call.pause()

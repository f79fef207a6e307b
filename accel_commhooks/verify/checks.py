"""The checks by name, and how one is run: what it raises is its failure, and the ranks agree before the next one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..comm.collectives import Communicator
from ..comm.roll_call import RollCall, named
from ..config.errors import LostRankError, described
from .case import FAIL, NOT_APPLICABLE, Case, Outcome, failed
from .measures import host_reads, kernels, overlap, sent_bytes
from .memories import feedback, overflow
from .training import consensus, equals_ddp, resume

Check = Callable[[Case], Outcome]

CHECKS: dict[str, Check] = {
    "equals_ddp": equals_ddp,
    "feedback": feedback,
    "consensus": consensus,
    "overflow": overflow,
    "resume": resume,
    "host_reads": host_reads,
    "bytes": sent_bytes,
    "kernels": kernels,
    "overlap": overlap,
}


def run_check(check: Check, case: Case) -> tuple[Outcome, str | None]:
    """What this rank found, and the error that ended the check here, if one did."""
    try:
        return check(case), None
    except LostRankError as error:
        return failed(_lost(described(error))), "lost"
    except Exception as error:
        return failed(f"a check must not raise, but got {described(error)}; report it with this file"), "raised"
    finally:
        gc.collect()  # models of this check that a failure left behind go before the next one


def _lost(text: str) -> str:
    return f"ranks must meet in every collective, but {text}; see that no rank was killed, and rerun with a longer --timeout"


def agree(comm: Communicator, question: str, own: Outcome, error: str | None) -> tuple[Outcome, str | None]:
    """The outcome on all ranks, and why nothing collective may follow, or None. Every rank gets the same answer.

    Through the store: where a rank has left a check early, a collective here would meet one that belongs to the check.
    """
    answer = {**asdict(own), "error": error}
    call = RollCall(comm.everyone.process_group, question)  # type: ignore[arg-type]
    call.answer(answer)
    if call.is_possible:
        try:
            answers = call.everyone(f"finish the check '{question}'")
        except LostRankError as lost:
            return failed(_lost(described(lost))), "some ranks did not finish a check"
    else:
        answers = comm.gather_objects(answer)
    return combine(answers)


def combine(answers: Sequence[dict]) -> tuple[Outcome, str | None]:
    """One outcome from those of all ranks: a failure anywhere is a failure. Figures are rank 0's."""
    failing = [rank for rank, answer in enumerate(answers) if answer["status"] == FAIL]
    errors = [answer["error"] for answer in answers]
    stop = None
    if "lost" in errors:
        stop = "a collective failed, and ranks are out of step"
    elif None in errors and "raised" in errors:
        broken = [rank for rank, error in enumerate(errors) if error]
        stop = f"{named(broken)} left a check early, and ranks are out of step"
    if failing:
        # A rank that raised is the cause; one that then lost it in a collective is a consequence.
        cause = min(failing, key=lambda rank: (errors[rank] == "lost", rank))
        where = "" if len(failing) == len(answers) else f"on {named(failing)}: "
        return Outcome(FAIL, where + answers[cause]["text"], answers[cause]["figures"]), stop
    statuses = {answer["status"] for answer in answers}
    if len(statuses) > 1:
        return failed(f"a check must apply to all ranks or to none, but found {', '.join(sorted(statuses))}"), stop
    first = answers[0]
    text = first["text"] if NOT_APPLICABLE not in statuses else next(answer["text"] for answer in answers)
    return Outcome(first["status"], text, first["figures"]), stop

"""Checks of what training ends with: DDP's weights, one consensus, the same after a resume."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..comm.wire import roundoff, wire_dtype_named
from .case import Case, Outcome, failed, not_applicable, passed
from .subject import EPSILON, LEARNING_RATE, Subject, Weights, distance, largest


def equals_ddp(case: Case) -> Outcome:
    """The weights after some steps of AdamW are those of plain DDP."""
    if not case.hook_class.equals_ddp:
        return not_applicable("it does not promise DDP's weights")
    plain, gradients = case.plain(), [torch.zeros((), device=case.device)]
    for parameter in plain.ddp.parameters():
        parameter.register_hook(lambda gradient: gradients.append(gradient.detach().abs().amax()))
    start = plain.weights()
    plain.train(case.steps)
    subject = case.subject()
    subject.train(case.steps)
    subject.synchronize()
    wanted, got = plain.weights(), subject.weights()
    off, moved = distance(got, wanted), distance(wanted, start)
    allowed = _allowed(case, float(torch.stack(gradients).amax()), wanted)
    subject.close()
    figures = {"distance": off, "allowed": allowed, "moved": moved, "steps": case.steps}
    if not moved > 2 * allowed:
        return failed(
            f"training must move weights more than rounding may, {allowed:.3g}, but moved them by {moved:.3g}; this check is "
            "too weak for so many ranks, please report it",
            **figures,
        )
    if not off <= allowed:
        return failed(
            f"weights must be plain DDP's, within {allowed:.3g} after {case.steps} steps, but are {off:.3g} off; do not use "
            "this hook here, and report it with the file that this command wrote",
            **figures,
        )
    return passed(**figures)


def _allowed(case: Case, largest_gradient: float, weights: Weights) -> float:
    """How far from DDP's the weights may be.

    A mean over W ranks in a type of unit roundoff u has W independent roundings: four standard deviations of their sum are
    4 sqrt(W) u times the gradient g. A step moves weights by lr (1 + g / epsilon) / epsilon times an error of the gradient
    at most, the derivative of lr m / (sqrt(v) + epsilon). Weights that travel in that type are rounded once more.
    """
    wire = wire_dtype_named(case.hook_class.wire_dtype(case.options))
    gradient = max(case.everyone(largest_gradient))
    slope = LEARNING_RATE * (1 + gradient / EPSILON) / EPSILON
    rounded_weights = roundoff(wire) * largest(weights) if wire is not None else 0.0
    return case.steps * slope * _of_sums(case, wire) * gradient + rounded_weights + case.rounding(weights)


def _of_sums(case: Case, wire: torch.dtype | None) -> float:
    """The relative error of a mean over all ranks in a type: four standard deviations of as many roundings."""
    return 4 * case.comm.size**0.5 * roundoff(wire or torch.float32)


def consensus(case: Case) -> Outcome:
    """After synchronize() all replicas are equal to the bit, and training has moved them."""
    subject = case.subject()
    start = subject.weights()
    subject.train(case.steps)
    own = subject.weights()
    if not case.hook_class.replicas_agree:
        subject.close()
        return not_applicable("it does not promise equal replicas", moved=distance(own, start))
    spread = case.everyone(distance(own, {name: case.mean(value) for name, value in own.items()}))
    means = {name: case.mean(value) for name, value in own.items()}
    subject.synchronize()
    final = subject.weights()
    differing = case.differing_ranks(final)
    moved, from_mean = distance(final, start), distance(final, means)
    subject.close()
    figures = {"moved": moved, "spread_before": max(spread), "from_mean": from_mean, "steps": case.steps}
    if differing:
        return failed(
            f"replicas must be equal to the bit after synchronize(), but those of ranks {differing} differ from rank 0's; "
            "do not use this hook here, and report it with the file that this command wrote",
            differing_ranks=differing,
            **figures,
        )
    if not moved > case.rounding(final):
        return failed(
            f"{case.steps} steps must move the weights, but the largest change is {moved:.3g}; are gradients lost?",
            **figures,
        )
    if not from_mean <= moved + case.rounding(final):
        return failed(
            f"the consensus must lie among the replicas, but is {from_mean:.3g} from their mean, and training moved them "
            f"by {moved:.3g} only; report it with the file that this command wrote",
            **figures,
        )
    return passed(**figures)


def resume(case: Case) -> Outcome:
    """A run that is saved half way and resumed in fresh objects ends with the weights of one that was not interrupted."""
    half = case.steps // 2
    first = case.subject()
    first.train(half)
    first.handle.open_consensus()  # type: ignore[union-attr]
    saved = _save(case, first)
    saved_weights = first.weights()
    first.train(range(half, case.steps))
    first.synchronize()
    wanted = first.weights()
    first.close()
    second = case.subject()
    _load(case, second, saved)
    second.train(range(half, case.steps))
    second.synchronize()
    # A new model's first buckets are others, so sums have another order; in the type that travels this shows.
    wire = wire_dtype_named(case.hook_class.wire_dtype(case.options))
    narrow = _of_sums(case, wire) * distance(wanted, saved_weights) if wire is not None else 0.0
    off, allowed = distance(second.weights(), wanted), case.rounding(wanted) + narrow
    steps = second.handle.steps  # type: ignore[union-attr]
    second.close()
    figures = {"distance": off, "allowed": allowed, "resumed_at": half, "steps": steps}
    if steps != case.steps:
        return failed(
            f"a resumed run must count on from step {half} to {case.steps}, but is at {steps}; report it with the file "
            "that this command wrote",
            **figures,
        )
    if not off <= allowed:
        return failed(
            f"a resumed run must end with the same weights, within {allowed:.3g}, but is {off:.3g} off; do not resume runs "
            "with this hook here, and report it with the file that this command wrote",
            **figures,
        )
    return passed(**figures)


def _save(case: Case, subject: Subject) -> bytes:
    """This rank's file, with the model and the optimizer of rank 0 in it where replicas agree, as in a checkpoint."""
    assert subject.handle is not None
    subject.handle.prepare_save()
    shared = _to_bytes({"model": subject.ddp.module.state_dict(), "optimizer": subject.optimizer.state_dict()})
    if case.hook_class.replicas_agree:
        shared = case.everyone(shared)[0]
    return _to_bytes({"hook": subject.handle.state_dict(), "shared": shared})


def _load(case: Case, subject: Subject, saved: bytes) -> None:
    state = torch.load(io.BytesIO(saved), weights_only=True, map_location=case.device)
    shared = torch.load(io.BytesIO(state["shared"]), weights_only=True, map_location=case.device)
    subject.ddp.module.load_state_dict(shared["model"])
    subject.optimizer.load_state_dict(shared["optimizer"])
    assert subject.handle is not None
    subject.handle.load_state_dict(state["hook"])


def _to_bytes(state: dict[str, Any]) -> bytes:
    """Through a file, as a checkpoint goes."""
    with tempfile.TemporaryDirectory(prefix="accel_commhooks_verify_") as folder:
        path = Path(folder) / "state.pt"
        torch.save(state, path)
        return path.read_bytes()

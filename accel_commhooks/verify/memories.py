"""Checks of what hooks keep between steps: no part of a gradient is lost, and an overflow leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .case import Case, Outcome, failed, not_applicable, passed
from .subject import Subject, Weights, distance, largest

INITIAL_SCALE = 256.0


def feedback(case: Case) -> Outcome:
    """Error feedback: mean of (gradient + residual before) == result + mean residual after, for every element."""
    subject = case.subject()
    subject.train(case.steps)
    if not _residuals(subject):
        subject.close()
        return not_applicable("it keeps no residuals: its state_dict() has no 'error' by parameter name")
    figures: dict[str, Any] = {}
    for step in (case.steps, case.steps + 1):
        outcome = _one_step_of_feedback(case, subject, step, figures)
        if outcome is not None:
            return outcome
    subject.close()
    return passed(**figures)


def _one_step_of_feedback(case: Case, subject: Subject, step: int, figures: dict[str, Any]) -> Outcome | None:
    before = _residuals(subject)
    if not largest(before) > 0:
        return failed(
            f"what compression leaves out must be kept, but all residuals are zero after {step} steps; does the hook "
            "compress, and is its residual lost?"
        )
    gradients, result = _reduced_gradients(subject, step)
    after = _residuals(subject)
    missed, off, scale = 0.0, 0.0, 0.0
    worst = ""
    for name, gradient in gradients.items():
        shape = gradient.shape
        zero = torch.zeros_like(gradient)
        held = before.get(name, zero).reshape(shape).to(gradient), after.get(name, zero).reshape(shape).to(gradient)
        mean = case.mean(gradient)
        given, kept = mean + case.mean(held[0]), result[name].double() + case.mean(held[1])
        difference = float((given - kept).abs().amax())
        if not difference <= off:
            off, worst = difference, name
        missed = max(missed, float((result[name].double() - mean).abs().amax()))
        scale = max(scale, largest({"given": given, "held": held[0]}))
    # Products and sums of float32: some roundings of the largest values.
    allowed = 64 * 2**-23 * scale
    figures |= {"distance": off, "allowed": allowed, "left_out": missed}
    if not missed > allowed:
        return failed(
            f"compression must leave something out of a random gradient, but the result is the mean within {missed:.3g}; "
            "the hook did not act",
            **figures,
        )
    if not off <= allowed:
        return failed(
            f"mean of gradient + residual must equal result + mean of the new residual, within {allowed:.3g}, but '{worst}' is "
            f"{off:.3g} off: a part of the gradients is lost; do not use this hook here, and report it with the file that "
            "this command wrote",
            **figures,
        )
    return None


def _residuals(subject: Subject) -> Weights:
    assert subject.handle is not None
    kept = subject.handle.state_dict().get("error")
    tensors = kept.items() if isinstance(kept, Mapping) else ()
    return {name: value.detach().clone() for name, value in tensors if isinstance(value, torch.Tensor)}


def _reduced_gradients(subject: Subject, step: int) -> tuple[Weights, Weights]:
    """One step; this rank's own gradients as DDP hands them over, and what the hook made of them."""
    names, local = subject.hook.context.names, {}
    reduce = subject.hook.reduce

    def record(bucket: Any) -> Any:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            local[names[parameter]] = gradient.detach().clone()
        return reduce(bucket)

    subject.hook.reduce = record
    try:
        subject.backward(step)
    finally:
        del subject.hook.reduce
    result = {name: p.grad.detach().clone() for p, name in names.items() if p.grad is not None}
    subject.finish()
    return local, result


def overflow(case: Case) -> Outcome:
    """One rank's gradients are infinite once, under a GradScaler: every rank skips that step, and training goes on."""
    subject = case.subject()
    scaler = torch.amp.GradScaler(case.device.type, init_scale=INITIAL_SCALE, growth_interval=10**6)
    infinite_at = case.steps - 2
    for step in range(infinite_at):
        subject.scaled_step(step, scaler)
    reduces = case.hook_class.replicas_agree and subject.hook.reduces_this_step()
    weights, memories = subject.weights(), _tensors_in(subject.hook.state_dict())
    last = case.comm.rank == case.comm.size - 1
    subject.scaled_step(infinite_at, scaler, float("inf") if last else 1.0)
    after, memories_after = subject.weights(), _tensors_in(subject.hook.state_dict())
    skipped = case.everyone(distance(after, weights) == 0 and scaler.get_scale() < INITIAL_SCALE)
    changed = sorted(name for name in memories if not torch.equal(memories[name], memories_after[name]))
    for step in range(infinite_at + 1, infinite_at + 1 + max(3, case.cycle)):
        subject.scaled_step(step, scaler)
    subject.synchronize()
    final = subject.weights()
    moved, finite = distance(final, after), all(bool(value.isfinite().all()) for value in final.values())
    differing = case.differing_ranks(final) if case.hook_class.replicas_agree else []
    subject.close()
    figures = {"skipped": skipped, "moved_afterwards": moved, "memories": len(memories), "must_all_skip": reduces}
    report = "do not train in fp16 with this hook here, and report it with the file that this command wrote"
    wrong = [rank for rank, skips in enumerate(skipped) if not skips and (reduces or rank == case.comm.size - 1)]
    if wrong:
        return failed(
            f"an infinite gradient on rank {case.comm.size - 1} must make every rank skip the step, but ranks {wrong} "
            f"stepped; {report}",
            **figures,
        )
    if reduces and changed:
        return failed(
            f"a skipped step must leave every memory as it was, but {len(changed)} changed ({', '.join(changed[:3])}); "
            f"{report}",
            **figures,
        )
    if not finite or not moved > 0:
        return failed(
            f"training must go on after a skipped step, but weights are {'stuck' if finite else 'not finite'}; {report}",
            **figures,
        )
    if differing:
        return failed(f"replicas must agree after a skipped step, but ranks {differing} differ; {report}", **figures)
    return passed(**figures)


def _tensors_in(state: Any, name: str = "") -> Weights:
    if isinstance(state, torch.Tensor):
        return {name: state.detach().clone()}
    inside = state.items() if isinstance(state, Mapping) else ()
    return {path: tensor for key, value in inside for path, tensor in _tensors_in(value, f"{name}/{key}").items()}

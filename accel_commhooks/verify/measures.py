"""Checks of what a step costs: reads by the host, bytes, kernels, and how much communication is hidden."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from ..comm.cost import Problem
from ..hooks.host import as_on_accelerator
from ..upstream.dispatch import Calls, Interval, device_kernels
from .case import Case, Outcome, failed, measured, not_applicable, passed
from .subject import Subject

BYTES_ALLOWED = 0.05
"""Relative: formulas leave out flags and the padding of slices."""
SYNCHRONIZING = "synchronizing CUDA operation"


def host_reads(case: Case) -> Outcome:
    """In a step with the hook the host waits for the device no more often than under plain DDP."""
    on_cuda = case.device.type == "cuda"
    path = "CUDA, counted by torch.cuda.set_sync_debug_mode" if on_cuda else "the accelerator's, forced on a CPU"
    steps = 2 * case.cycle
    with contextlib.nullcontext() if on_cuda else as_on_accelerator():
        baseline = _reads(case.plain(delayed=False), case, steps)
        subject = case.subject(delayed=False)
        reads = _reads(subject, case, steps)
        subject.synchronize()
        subject.close()
    added = dict(reads - baseline)
    figures = {"path": path, "steps": steps, "added": added, "under_ddp": sum(baseline.values())}
    if added:
        return failed(
            f"a step must not make the host wait for the device more often than plain DDP, but the hook adds "
            f"{sum(added.values())} reads in {steps} steps ({', '.join(added)[:160]}); it will be slow on an accelerator: "
            "report it with the file that this command wrote",
            **figures,
        )
    return passed(**figures)


def _reads(subject: Subject, case: Case, steps: int) -> Counter[str]:
    subject.train(case.steps)
    measured_steps = range(case.steps, case.steps + steps)
    if case.device.type != "cuda":
        with Calls() as calls:
            subject.train(measured_steps)
        return calls.reads
    with warnings.catch_warnings(record=True) as caught, _sync_debug_mode():
        warnings.simplefilter("always")
        subject.train(measured_steps)
    return Counter(SYNCHRONIZING for warning in caught if SYNCHRONIZING in str(warning.message))


@contextlib.contextmanager
def _sync_debug_mode() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sent_bytes(case: Case) -> Outcome:
    """What a step sends is what the hook's own formula predicts."""
    if not case.hook_class.counted:
        return not_applicable("its traffic does not go through this package")
    subject = case.subject(delayed=False)
    assert subject.handle is not None
    traffic, topology = subject.handle.comm.traffic, subject.handle.comm.topology
    predicted = case.hook_class.cost(case.options, Problem.of(subject.ddp.module, topology))
    lead, steps = case.options.lead(), 2 * case.cycle
    subject.train(case.steps + lead)
    before = traffic.scope("within"), traffic.scope("between")
    subject.train(range(case.steps + lead, case.steps + lead + steps))
    after = traffic.scope("within"), traffic.scope("between")
    everyone = case.everyone([now - then for now, then in zip(after, before, strict=True)])
    subject.synchronize()
    subject.close()
    within, between = (sum(sent[scope] for sent in everyone) / len(topology.nodes) / steps for scope in (0, 1))
    figures = {"within": within, "between": between, "plain_ddp": sum(traffic.of_plain_ddp(_size(subject)).values())}
    if predicted is None:
        return not_applicable("it has no formula", **figures)
    figures |= {"predicted_within": predicted.within, "predicted_between": predicted.between}
    total, expected = within + between, predicted.within + predicted.between
    if abs(total - expected) > BYTES_ALLOWED * max(total, expected):
        return failed(
            f"a node must send what the hook's formula predicts, within {BYTES_ALLOWED:.0%}, but it sends {total:.0f} bytes a "
            f"step and {expected:.0f} are predicted; its predictions in bench are wrong: report it with the file that this "
            "command wrote",
            **figures,
        )
    return passed(**figures)


def _size(subject: Subject) -> int:
    return sum(p.numel() * p.element_size() for p in subject.ddp.parameters())


def kernels(case: Case) -> Outcome:
    """How many calls (on CUDA: kernels) the hook adds to a step of plain DDP."""
    steps = 2 * case.cycle
    on_cuda = case.device.type == "cuda"
    counts = []
    with contextlib.nullcontext() if on_cuda else as_on_accelerator():
        for subject in (case.plain(delayed=False), case.subject(delayed=False)):
            subject.train(case.steps)
            measured_steps = range(case.steps, case.steps + steps)
            if on_cuda:
                counts.append(len(_profile(subject, measured_steps)))
            else:
                with Calls() as calls:
                    subject.train(measured_steps)
                counts.append(sum(calls.calls.values()))
            subject.synchronize()
            subject.close()
    plain, ours = (count / steps for count in counts)
    unit = "kernels" if on_cuda else "ATen calls"
    return measured(f"{ours - plain:+.0f}", unit=unit, added=ours - plain, under_ddp=plain, with_hook=ours)


def overlap(case: Case) -> Outcome:
    """Which share of communication is hidden behind compute; on CUDA only."""
    if case.device.type != "cuda":
        return not_applicable("not measured on CPU")
    subject = case.subject(delayed=False)
    subject.train(case.steps)
    seen = _profile(subject, range(case.steps, case.steps + 2 * case.cycle))
    subject.synchronize()
    subject.close()
    communication = [interval for name, interval in seen if "nccl" in name.lower()]
    compute = [interval for name, interval in seen if "nccl" not in name.lower()]
    if not communication:
        return not_applicable("the profiler saw no communication on the device")
    share = hidden_share(communication, compute)
    return measured(
        f"{share:.0%}", hidden_share=share, communication_us=sum(end - start for start, end in communication)
    )


def _profile(subject: Subject, steps: range) -> list[tuple[str, Interval]]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        subject.train(steps)
        torch.cuda.synchronize()
    return device_kernels(profile)


def hidden_share(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """The share of the time in which something communicates during which something computes as well."""
    sending, computing = _union(communication), _union(compute)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sending for b in computing)
    return both / sum(end - start for start, end in sending)


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged

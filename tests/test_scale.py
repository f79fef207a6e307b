"""A thousand ranks, of which one is real: what a hook allocates, calls and launches there (torch's fake process group).

Tensors are on the meta device, so nothing is computed, and any look at a value from the host raises an error.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernels

from accel_commhooks.comm.quantised import BLOCK

RANKS = 1024
HOOKS = {
    "allreduce": ("allreduce", {}),
    "bf16_compress": ("bf16_compress", {}),
    "int8_compress": ("int8_compress", {}),
    "powersgd": ("powersgd", {"start_powerSGD_iter": 0, "matrix_approximation_rank": 4}),
    "powersgd, int8": ("powersgd", {"start_powerSGD_iter": 0}),
    "batched_powersgd": ("batched_powersgd", {"start_powerSGD_iter": 0}),
    "zero_overlap": ("zero_overlap", {}),
    "zero_overlap, bf16": ("zero_overlap", {"wire_dtype": "bf16"}),
    "zero_overlap, int8": ("zero_overlap", {"wire_dtype": "int8"}),
    "zero_overlap, whole parameters": ("zero_overlap", {"shard_buckets": False}),
}


class _Allocations(TorchDispatchMode):
    """The largest tensor that was made, in elements."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if not function.is_view and not str(function).startswith("c10d."):
            known = {id(each) for each in tree_leaves((args, kwargs or {}))}
            sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor) and id(t) not in known]
            self.largest = max([self.largest, *sizes])
        return made


def _step(world, hook, options):
    """(hook at work, kernels and collectives of a step, largest tensor made in one)"""
    shapes = kernels.bert_base(layers=2)
    with kernels.fake_ranks(world):
        counted = kernels.count(hook, options, shapes)
        run = kernels.Run.start(hook, options, shapes)
        for _ in range(2):
            run.step()
        sent_before = dict(run.hook.comm.traffic.sent)
        with _Allocations() as allocations:
            run.step()
        traffic = run.hook.comm.traffic
        sent = sum(traffic.sent.values()) - sum(sent_before.values())
    return run, counted, allocations.largest, sent


@pytest.mark.parametrize("label", HOOKS)
def test_calls_and_kernels_do_not_grow_with_the_ranks(label):
    hook, options = HOOKS[label]
    (_, few, _, _), (_, many, _, _) = (_step(world, hook, options) for world in (8, RANKS))
    # Of so many slices the last ones are shorter, which is a copy of its own each way; and with more owners than parameters
    # each whole parameter is a call of its own.
    parameters = len(kernels.bert_base(layers=2))
    assert 0 < many.collectives.total() <= few.collectives.total() + (2 * parameters if "whole" in label else 0)
    # What travels in digits is whole blocks from every rank: a copy with zeros behind it, and one back.
    padded = 2 * many.collectives.total() if "int8" in label else 0
    assert many.total <= few.total + padded + (2 * parameters if hook == "zero_overlap" else 0)


@pytest.mark.parametrize("label", HOOKS)
def test_nothing_that_is_made_grows_with_the_ranks(label):
    """Slices are padded to equal lengths: at most one element a rank for each parameter of a bucket, or a block of digits."""
    hook, options = HOOKS[label]
    run, _, largest, _ = _step(RANKS, hook, options)
    bucket = max(each.buffer().numel() for each in run.buckets)
    whole = sum(each.buffer().numel() for each in run.buckets)
    allowed = whole + 2 * math.isqrt(whole) + 1 if hook == "batched_powersgd" else bucket  # a square of all parameters
    padding = RANKS * max(len(each.parameters()) for each in run.buckets) * (BLOCK if "int8" in label else 1)
    assert largest <= allowed + padding


def test_bytes_are_those_of_the_formulas():
    from accel_commhooks.comm.cost import Problem
    from accel_commhooks.config.registry import get_hook

    for label in ("allreduce", "powersgd", "zero_overlap"):
        hook, options = HOOKS[label]
        run, _, _, sent = _step(RANKS, hook, options)
        predicted = get_hook(hook).cost(run.hook.options, Problem.of(run.model, run.hook.comm.topology))
        assert sent == pytest.approx(predicted.within + predicted.between, rel=0.02), label


def test_a_rank_owns_a_thousandth():
    run, _, _, _ = _step(RANKS, "zero_overlap", {})
    state = sum(
        value.numel()
        for each in run.optimizer.state.values()
        for value in each.values()
        if torch.is_tensor(value) and value.numel() > 1
    )
    whole = sum(parameter.numel() for parameter in run.model.parameters())
    assert 0 < state <= 2 * (whole / RANKS + len(list(run.model.parameters())))


def test_a_buffer_that_grows_with_the_ranks_is_noticed(monkeypatch):
    from accel_commhooks.comm.collectives import Communicator

    real = Communicator.all_reduce

    def gathers_all(self, tensor, **how):
        torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device).zero_()
        return real(self, tensor, **how)

    monkeypatch.setattr(Communicator, "all_reduce", gathers_all)
    with pytest.raises(AssertionError):
        test_nothing_that_is_made_grows_with_the_ranks("allreduce")

"""How many kernels a hook adds to a step on an accelerator, counted on the meta device (benchmarks/kernels.py)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernels

ROWS = list(kernels.CASES)
IN_DIGITS = [row for row in ROWS if "int8" in row]


@pytest.fixture(scope="module")
def ranks():
    with kernels.fake_ranks():
        yield


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model", ["BERT-base", "GPT-2"])
def test_kernels_of_a_step(ranks, model, row):
    hook, options, what, allowed = kernels.CASES[row]
    shapes = kernels.MODELS[model]()
    assert 0 < kernels.added(hook, options, shapes) <= allowed * kernels.size_of(shapes, what)


@pytest.mark.parametrize(
    "row", ["powersgd, rank 4", "powersgd, alternate", "zero_overlap", "zero_overlap, bf16 wire", *IN_DIGITS]
)
def test_kernels_of_a_step_where_every_matrix_has_a_bucket_of_its_own(ranks, row):
    hook, options, what, allowed = kernels.CASES[row]
    shapes = kernels.llama_7b()
    assert 0 < kernels.added(hook, options, shapes) <= allowed * kernels.size_of(shapes, what)


def test_kernels_do_not_depend_on_the_rank(ranks):
    counts = {row: kernels.added(*kernels.CASES[row][:2], kernels.bert_base(layers=2)) for row in ROWS[:3]}
    assert len(set(counts.values())) == 1, counts


def test_the_cost_of_bases_does_not_depend_on_the_number_of_layers(ranks):
    """Only what is done for each matrix and bucket grows: at most six calls for a matrix, and four for a bucket."""
    few, many = kernels.bert_base(layers=2), kernels.bert_base(layers=10)
    more = [kernels.size_of(many, what) - kernels.size_of(few, what) for what in ("matrix", "bucket")]
    grown = kernels.added("powersgd", {"start_powerSGD_iter": 0}, many) - kernels.added(
        "powersgd", {"start_powerSGD_iter": 0}, few
    )
    assert grown <= 6 * more[0] + 4 * more[1]


@pytest.mark.parametrize("row", ["powersgd, rank 4", "powersgd, rank 15 in int8"])
def test_unused_parameters_may_be_looked_for_within_the_same_bar(ranks, row):
    hook, options, what, allowed = kernels.CASES[row]
    shapes = kernels.bert_base()
    assert kernels.added(hook, options, shapes, finds_unused=True) <= allowed * kernels.size_of(shapes, what)


# The count itself.


def test_a_call_counts_and_a_view_does_not():
    with kernels.KernelCount() as counted:
        start = torch.empty(4, 4, device="meta")
        start.view(16)[2:].t()
        start.add_(1)
    assert dict(counted.kernels) == {"aten.add_.Tensor": 1}


def test_a_list_counts_as_one_only_where_one_kernel_takes_it():
    even = [torch.empty(4, 6, device="meta") for _ in range(3)]
    with kernels.KernelCount() as counted:
        torch._foreach_add_(even, [tensor + 0 for tensor in even])
    assert counted.kernels["aten._foreach_add_.List"] == 1
    with kernels.KernelCount() as counted:
        torch._foreach_copy_([tensor[:, :3] for tensor in even], [torch.empty(4, 3, device="meta") for _ in even])
    assert counted.kernels["aten._foreach_copy_.default"] == 3


def test_a_kernel_more_for_each_matrix_is_noticed(ranks, monkeypatch):
    from accel_commhooks.hooks.powersgd import lowrank

    shapes = kernels.bert_base(layers=2)
    before = kernels.added("powersgd", {"start_powerSGD_iter": 0}, shapes)
    real = lowrank.project
    monkeypatch.setattr(lowrank, "project", lambda m, p, q, **how: (m.mul_(1.0), real(m, p, q, **how)))
    assert kernels.added("powersgd", {"start_powerSGD_iter": 0}, shapes) > before

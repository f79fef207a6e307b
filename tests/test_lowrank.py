"""The mathematics of PowerSGD, without processes."""

import contextlib

import pytest
import torch

from accel_commhooks.hooks.host import as_on_accelerator
from accel_commhooks.hooks.powersgd.bases import orthonormal_bases
from accel_commhooks.hooks.powersgd.lowrank import (
    add_and_project,
    approximate,
    approximate_batch,
    project,
    random_factor,
    rank_for,
    rows_to_keep,
    square_side,
)
from accel_commhooks.hooks.powersgd.units import Matrix, _runs


@pytest.fixture(params=["cpu", "elsewhere"])
def basis_of(request):
    """The two ways: that of a CPU, and the one that other devices take."""
    with as_on_accelerator() if request.param == "elsewhere" else contextlib.nullcontext():
        yield lambda rows, *epsilon: orthonormal_bases([rows], *epsilon)[0]


def _check_basis(basis: torch.Tensor) -> torch.Tensor:
    """Rows are orthogonal, of length one or zero; returns how many have a length."""
    assert torch.isfinite(basis).all()
    gram = basis @ basis.transpose(1, 2)
    # Two projections, or Householder's, leave an orthogonality error of a few roundings of a sum over a row.
    tolerance = 16 * torch.finfo(basis.dtype).eps * basis.shape[2] ** 0.5
    diagonal = torch.diagonal(gram, dim1=1, dim2=2)
    assert ((diagonal - diagonal.round()).abs() <= tolerance).all()
    off = gram - torch.diag_embed(diagonal)
    assert off.abs().max() <= tolerance
    return diagonal.round().sum(dim=1)


def _check_span(basis: torch.Tensor, rows: torch.Tensor) -> None:
    projected = (rows @ basis.transpose(1, 2)) @ basis
    assert (projected - rows).norm() <= 1e-4 * rows.norm()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1.0, 1e10, 1e30])
@pytest.mark.parametrize(("n", "rank"), [(64, 1), (64, 4), (200, 16), (3, 3)])
def test_random_rows_become_orthonormal_and_keep_their_span(basis_of, n, rank, magnitude):
    torch.manual_seed(0)
    rows = torch.randn(5, rank, n)
    basis = basis_of(rows * magnitude)
    assert (_check_basis(basis) == rank).all()
    _check_span(basis, rows)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("case", ["all zero", "first zero", "repeated", "sum of others", "more rows than columns"])
def test_rows_without_a_direction_do_no_harm(basis_of, request, case, magnitude):
    torch.manual_seed(0)
    base = torch.randn(2, 2, 32)
    rows, rank = {
        "all zero": (torch.zeros(2, 3, 32), 0),
        "first zero": (torch.cat([torch.zeros(2, 1, 32), base], 1), 2),
        "repeated": (torch.cat([base, base], 1), 2),
        "sum of others": (torch.cat([base, base.sum(1, keepdim=True)], 1), 2),
        "more rows than columns": (torch.randn(2, 8, 3), 3),
    }[case]
    basis = basis_of(rows * magnitude)
    assert (_check_basis(basis) >= rank).all()
    if "elsewhere" in request.node.callspec.id:
        assert (_check_basis(basis) == rank).all(), "dropped, not made of noise"
    _check_span(basis, rows)


def test_a_nan_stays_visible(basis_of):
    rows = torch.randn(1, 2, 8)
    rows[0, 0, 3] = float("nan")
    assert basis_of(rows).isnan().any()


def test_epsilon_shrinks_as_in_torch(basis_of):
    rows = torch.zeros(1, 1, 4)
    rows[0, 0, 0] = 3.0
    assert basis_of(rows, 1.0)[0, 0, 0] == pytest.approx(0.75)
    assert basis_of(rows.double(), 1.0)[0, 0, 0] == pytest.approx(0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nearly", [1e-2, 1e-4])
def test_rows_that_nearly_depend_on_each_other_are_orthogonal_to_rounding(basis_of, nearly, dtype):
    torch.manual_seed(0)
    base = torch.randn(3, 1, 300, dtype=dtype)
    rows = base + nearly * torch.randn(3, 4, 300, dtype=dtype)
    basis = basis_of(rows)
    assert (_check_basis(basis) == 4).all()
    _check_span(basis, rows)


def test_factors_of_a_model_are_orthogonalised_together(basis_of):
    """Of any lengths, ranks and types, each as if it were alone."""
    torch.manual_seed(0)
    shapes = [(2, 4, 64), (1, 4, 200), (3, 4, 64), (1, 2, 64), (1, 4, 33)]
    factors = [torch.randn(shape) for shape in shapes] + [torch.randn(2, 4, 50, dtype=torch.float64)]
    factors[1].zero_()
    factors[3][0, 1] = torch.nan
    together = orthonormal_bases(factors)
    for factor, basis in zip(factors, together, strict=True):
        assert basis.shape == factor.shape and basis.dtype == factor.dtype
        assert torch.equal(basis.isnan().any(), factor.isnan().any()), "a NaN reaches its own matrix and no other"
        if not factor.isnan().any():
            assert torch.allclose(basis, basis_of(factor), atol=1e-6)
            _check_basis(basis)


def test_rank_follows_torchs_rule_of_size():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    for rows, columns, rank, rate in [(64, 64, 4, 2), (8, 8, 2, 2), (10, 1000, 4, 2), (3, 1000, 4, 2), (64, 64, 16, 2)]:
        stock = _should_compress(rows, columns, min(rows, columns, rank), rate)[0]
        assert bool(rank_for(rows, columns, rank, rate)) == stock


def test_random_factors_depend_on_name_and_seed_only():
    one = random_factor(2, 5, key="a", seed=1)
    torch.manual_seed(99)
    assert torch.equal(one, random_factor(2, 5, key="a", seed=1))
    assert not torch.equal(one, random_factor(2, 5, key="b", seed=1))
    assert not torch.equal(one, random_factor(2, 5, key="a", seed=2))


@pytest.mark.parametrize("numel", [1, 2, 4, 5, 99, 100, 101])
def test_square_side_is_the_smallest_that_fits(numel):
    side = square_side(numel)
    assert side * side >= numel > (side - 1) ** 2


# One row, some of a block, a block and a row, three blocks and some: a block is 2**18 bytes, 170 rows of 384.
SIZES = [(1, 8), (50, 384), (171, 384), (600, 384), (4, 200_000)]


def _close(got, wanted, terms):
    """Equal but for the rounding of sums of so many terms, in float32."""
    return (got - wanted).abs().max() <= 4 * torch.finfo(torch.float32).eps * terms**0.5 * wanted.abs().max()


@pytest.fixture(params=["in blocks", "in batches"])
def way(request):
    """One matrix at a time, as on a CPU, or batches, as elsewhere: functions on batches of matrices."""

    def add_and_project_all(m, residual, p, q, *, onto_p):
        if request.param == "in batches":
            m.add_(residual[:, 1:])
            project(m, p, q, onto_p=onto_p)
            return
        for index in range(len(m)):
            add_and_project(m[index], residual[index, 1:], p[index], q[index], onto_p=onto_p)

    def approximate_all(m, residual, result, counted, fine):
        if request.param == "in batches":
            approximate_batch(m, residual, result, counted, rows_to_keep(m.shape[1] + 3, torch.tensor(fine)))
            return
        for index in range(len(m)):
            of_one = [(p[index], q[index]) for p, q in (result, counted)]
            approximate(m[index], residual[index, 1:], *of_one, keeps=fine)

    return add_and_project_all, approximate_all


def _some(n, m):
    """A gradient that is a strided view, a residual with its scratch row, and factors."""
    torch.manual_seed(0)
    flat = torch.randn(3 * (n * m + 5))
    gradient = flat.as_strided((3, n, m), (n * m + 5, m, 1))
    return gradient, torch.randn(3, n + 1, m), torch.randn(3, 4, n), torch.randn(3, 4, m)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("onto_p", [False, True])
def test_gradient_and_residual_are_added_and_projected(way, n, m, onto_p):
    gradient, residual, p, q = _some(n, m)
    whole = (gradient + residual[:, 1:]).double()
    wanted = (p.double(), p.double() @ whole) if onto_p else (q.double() @ whole.mT, q.double())
    before = residual.clone()
    (q if onto_p else p).fill_(torch.nan)  # whatever was there before does not matter
    way[0](gradient, residual, p, q, onto_p=onto_p)
    assert torch.equal(gradient.double(), whole) and torch.equal(residual, before)
    assert _close(p, wanted[0], m) and _close(q, wanted[1], n)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("fine", [True, False])
def test_approximation_and_residual_are_the_whole(way, n, m, fine):
    gradient, residual, p, q = _some(n, m)
    counted = p + 1, q - 1
    whole, before = gradient.clone(), residual.clone()
    way[1](gradient, residual, (p, q), counted, fine)
    assert _close(gradient, p.double().mT @ q.double(), 4)
    if fine:
        assert _close(residual[:, 1:], whole - counted[0].double().mT @ counted[1].double(), 4)
    else:
        assert torch.equal(residual[:, 1:], before[:, 1:])


def test_a_residual_survives_what_is_not_finite(way):
    residual = torch.randn(1, 9, 16)
    before = residual.clone()
    bad = torch.full((1, 8, 16), torch.nan)
    factors = torch.full((1, 2, 8), torch.inf), torch.randn(1, 2, 16)
    way[1](bad, residual, factors, factors, False)
    assert torch.equal(residual[:, 1:], before[:, 1:])


def test_matrices_at_even_distances_are_one_run():
    def matrix(offset, rows=2):
        return Matrix(f"at {offset}", offset, rows, 4, 1)

    def runs(*matrices):
        return [([x.offset for x in run], distance) for run, distance in _runs(list(matrices)) if len(run) > 1], sum(
            len(run) for run, _ in _runs(list(matrices))
        )

    assert runs(matrix(0), matrix(10), matrix(20)) == ([([0, 10, 20], 10)], 3)
    assert runs(matrix(0), matrix(10), matrix(30), matrix(50)) == ([([0, 10], 10), ([30, 50], 20)], 4)
    assert runs(matrix(0), matrix(8, rows=3), matrix(20), matrix(29, rows=3)) == ([([0, 20], 20), ([8, 29], 21)], 4)

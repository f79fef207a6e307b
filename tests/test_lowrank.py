"""The mathematics of PowerSGD, without processes."""

import pytest
import torch

from accel_commhooks.lowrank import orthogonalize, random_factor, rank_for, square_side


def _check_basis(basis: torch.Tensor, n: int) -> None:
    assert torch.isfinite(basis).all()
    gram = basis.transpose(1, 2) @ basis
    # Two projections leave an orthogonality error of a few roundings of a length-n sum.
    tolerance = 16 * torch.finfo(basis.dtype).eps * n**0.5
    diagonal = torch.diagonal(gram, dim1=1, dim2=2)
    assert ((diagonal - diagonal.round()).abs() <= tolerance).all()
    off = gram - torch.diag_embed(diagonal)
    assert off.abs().max() <= tolerance


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1.0, 1e10, 1e30])
@pytest.mark.parametrize(("n", "rank"), [(64, 1), (64, 4), (200, 16), (3, 3)])
def test_random_columns_become_orthonormal_and_keep_their_span(n, rank, magnitude):
    torch.manual_seed(0)
    columns = torch.randn(5, n, rank)
    basis = orthogonalize(columns * magnitude)
    _check_basis(basis, n)
    assert (torch.diagonal(basis.transpose(1, 2) @ basis, dim1=1, dim2=2) > 0.99).all()
    projected = basis @ (basis.transpose(1, 2) @ columns)
    assert (projected - columns).norm() <= 1e-4 * columns.norm()


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_columns_without_a_direction_become_zero(magnitude):
    torch.manual_seed(0)
    base = torch.randn(2, 32, 2)
    cases = {
        "all zero": torch.zeros(2, 32, 3),
        "first zero": torch.cat([torch.zeros(2, 32, 1), base], 2),
        "repeated": torch.cat([base, base], 2),
        "sum of others": torch.cat([base, base.sum(2, keepdim=True)], 2),
        "more columns than rows": torch.randn(2, 3, 8),
    }
    ranks = {"all zero": 0, "first zero": 2, "repeated": 2, "sum of others": 2, "more columns than rows": 3}
    for name, columns in cases.items():
        basis = orthogonalize(columns * magnitude)
        _check_basis(basis, columns.shape[1])
        assert (basis.norm(dim=1) > 0.5).sum(dim=1).tolist() == [ranks[name]] * 2, name


def test_a_nan_stays_visible():
    columns = torch.randn(1, 8, 2)
    columns[0, 3, 0] = float("nan")
    assert orthogonalize(columns).isnan().any()


def test_epsilon_shrinks_as_in_torch():
    columns = torch.zeros(1, 4, 1)
    columns[0, 0, 0] = 3.0
    assert orthogonalize(columns, epsilon=1.0)[0, 0, 0] == pytest.approx(0.75)


def test_rank_follows_torchs_rule_of_size():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    for rows, columns, rank, rate in [(64, 64, 4, 2), (8, 8, 2, 2), (10, 1000, 4, 2), (3, 1000, 4, 2), (64, 64, 16, 2)]:
        stock = _should_compress(rows, columns, min(rows, columns, rank), rate)[0]
        assert bool(rank_for(rows, columns, rank, rate)) == stock


def test_random_factors_depend_on_name_and_seed_only():
    like = torch.empty(0)
    one = random_factor(5, 2, key="a", seed=1, like=like)
    torch.manual_seed(99)
    assert torch.equal(one, random_factor(5, 2, key="a", seed=1, like=like))
    assert not torch.equal(one, random_factor(5, 2, key="b", seed=1, like=like))
    assert not torch.equal(one, random_factor(5, 2, key="a", seed=2, like=like))


@pytest.mark.parametrize("numel", [1, 2, 4, 5, 99, 100, 101])
def test_square_side_is_the_smallest_that_fits(numel):
    side = square_side(numel)
    assert side * side >= numel > (side - 1) ** 2

"""The quantised wire: digits and scales, and a mean of them over ranks."""

import contextlib
import math
import random
import time
from unittest import mock

import pytest
import torch
from models import device

from accel_commhooks.comm import means
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.comm.cost import Problem, mean_over_ranks
from accel_commhooks.comm.hierarchy import MeanOverRanks, NodeReduction
from accel_commhooks.comm.quantised import BLOCK, DIGIT_ERROR, blocks_for, decode, encode
from accel_commhooks.comm.topology import Topology


def _random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _there_and_back(values):
    return decode(encode(values), torch.empty_like(values))


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e30])
def test_an_error_is_at_most_half_a_digit_of_the_blocks_largest(scale):
    values = _random(3, 5, BLOCK) * scale
    largest = values.abs().amax(-1, keepdim=True)
    off = (_there_and_back(values) - values).abs()
    assert off.max() > 0, "nothing was rounded"
    assert (off <= largest * DIGIT_ERROR).all()


def test_blocks_do_not_share_a_scale():
    values = _random(2, BLOCK)
    values[0] *= 1e6
    off = (_there_and_back(values) - values).abs()
    assert off[1].max() <= values[1].abs().max() * DIGIT_ERROR


def test_zeros_and_numbers_below_the_smallest_scale_become_zero():
    values = torch.zeros(3, BLOCK)
    values[1, 7], values[2] = 1e-45, 2.0**-126
    assert torch.equal(_there_and_back(values), torch.zeros(3, BLOCK))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_so_and_no_other(bad):
    values = _random(2, 3, BLOCK)
    values[1, 2, 5] = bad
    finite = _there_and_back(values).isfinite().all(-1)
    assert finite.tolist() == [[True, True, True], [True, True, False]]


def test_the_largest_numbers_stay_finite():
    values = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    assert _there_and_back(values).isfinite().all()


def test_parts_hold_everything():
    for numbers in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 1):
        for ranks in (1, 2, 3, 8):
            blocks = blocks_for(numbers, ranks)
            assert ranks * blocks * BLOCK >= numbers
            assert numbers == 0 or ranks * (blocks - 1) * BLOCK < numbers


# Among ranks.

SIZES = (0, 1, 100, 2 * BLOCK, 3 * BLOCK, 50_000)
EVEN = 12 * BLOCK * 86  # no padding in 2, 3 or 4 parts


def _values(rank, numel, dtype):
    return _random(numel, seed=numel + rank).to(dtype) * (1 + rank)


def _means(rank, world_size, dtype, plant=None):
    comm = Communicator(ranks_per_node=1)
    with _planted(plant) if rank == 1 else contextlib.nullcontext():
        found = []
        under_way = []
        for numel in SIZES:
            values = _values(rank, numel, dtype).to(device())
            lost = torch.full_like(values, math.nan)
            under_way.append((MeanOverRanks(comm, torch.int8)(values, lost), lost))
        for pending, lost in under_way:
            found.append((pending.wait().cpu().clone(), lost.cpu()))
            pending.wait()  # twice does no harm
    return found, dict(comm.traffic.sent)


def _check_means(by_rank, world_size, dtype):
    for index, numel in enumerate(SIZES):
        values = [_values(rank, numel, dtype).double() for rank in range(world_size)]
        mean, result = sum(values) / world_size, by_rank[0][index][0]
        assert all(torch.equal(found[index][0], result) for found in by_rank), "ranks got other bits"
        if not numel:
            continue
        lost = sum(found[index][1].double() for found in by_rank) / world_size
        rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        if dtype == torch.bfloat16:
            rounding = torch.finfo(dtype).eps  # the result and what is lost are bfloat16 again
        largest = max(float(each.abs().max()) for each in values)
        assert (mean - result.double() - lost).abs().max() <= 8 * rounding * largest, "a part is lost for ever"
        # Once for each rank's values, once for the mean, which is no larger.
        allowed = 2 * largest * DIGIT_ERROR + rounding * largest
        assert (mean - result.double()).abs().max() <= allowed, "too coarse"
        if numel >= 100 and world_size > 1:
            assert lost.abs().max() > 0, "nothing was rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_mean_and_what_is_lost(pool, world_size, dtype):
    _check_means([found for found, _ in pool.run(_means, world_size, dtype)], world_size, dtype)


@contextlib.contextmanager
def _planted(plant):
    """One rank does it wrong."""
    real_mean, real_encode = means._mean_in_digits, means.encode

    def mean(comm, tensor, group, lost):
        yield from real_mean(comm, tensor, group, lost)
        if plant == "forgets what it lost":
            lost.zero_()
        if plant == "has other bits" and tensor.numel():
            tensor[0] = torch.nextafter(tensor[0], torch.full_like(tensor[0], math.inf))

    def encode(values):
        return real_encode((values * 8).round() / 8 if plant == "rounds twice" else values)

    with mock.patch.object(means, "_mean_in_digits", mean), mock.patch.object(means, "encode", encode):
        yield


PLANTS = {
    "forgets what it lost": "a part is lost for ever",
    "has other bits": "ranks got other bits",
    "rounds twice": "too coarse",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_check_of_means_can_fail(pool, plant):
    by_rank = [found for found, _ in pool.run(_means, 2, torch.float32, plant)]
    with pytest.raises(AssertionError, match=PLANTS[plant]):
        _check_means(by_rank, 2, torch.float32)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_the_formula(pool, world_size):
    for _, sent in pool.run(_means, world_size, torch.float32):
        problem = Problem((), Topology.even(world_size, 1))
        expected = sum(mean_over_ranks(problem, numel, "int8").between for numel in SIZES)
        assert sum(sent.values()) == expected


def _not_finite(rank, world_size, bad):
    comm = Communicator(ranks_per_node=1)
    values = torch.ones(1000, device=device())
    if rank == world_size - 1:
        values[700] = bad
    return MeanOverRanks(comm, torch.int8)(values).wait().cpu()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_not_finite_anywhere_is_not_finite_everywhere(pool, bad):
    for result in pool.run(_not_finite, 3, bad):
        assert not result[700].isfinite()
        assert result[:512].isfinite().all()


def _many(rank, world_size):
    """Thirty under way, among other collectives, waited for out of order."""
    comm, naps = Communicator(ranks_per_node=1), random.Random(rank)
    tensors = [torch.full((300 + 100 * index,), float(rank + index), device=device()) for index in range(30)]
    pending = []
    for index, tensor in enumerate(tensors):
        time.sleep(naps.choice([0, 0, 0.002]))
        pending.append(MeanOverRanks(comm, torch.int8)(tensor))
        if index % 5 == 0:
            comm.all_reduce(torch.ones(3, device=device())).wait()
    pending[20].wait()
    for each in pending:
        each.wait()
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_under_way(pool, world_size):
    middle = (world_size - 1) / 2
    for tensors in pool.run(_many, world_size):
        for index, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor, torch.full_like(tensor, middle + index), rtol=2 * 2**-8, atol=0)


# Nodes of several ranks.


def _in_levels(rank, world_size, hosts):
    comm = Communicator(hosts=hosts)
    mean = MeanOverRanks(comm, torch.int8)
    results = []
    for numel in SIZES[1:]:
        values = _values(rank, numel, torch.float32).to(device())
        lost = torch.full_like(values, math.nan)
        results.append((mean(values, lost).wait().cpu(), lost.cpu()))
    before = comm.traffic.scope("between")
    mean(_values(rank, EVEN, torch.float32).to(device())).wait()
    sent = comm.traffic.scope("between") - before
    number_of_the_node = torch.full((1000,), float(comm.topology.node_of[rank]), device=device())
    NodeReduction(comm).between(number_of_the_node, torch.int8).wait()
    return results, sent, number_of_the_node.cpu()


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abc"])
def test_nodes_have_their_own_mean_first_and_send_digits_of_that(pool, hosts):
    world_size, nodes = len(hosts), len(set(hosts))
    by_rank = pool.run(_in_levels, world_size, list(hosts))
    for index, numel in enumerate(SIZES[1:]):
        values = [_values(rank, numel, torch.float32).double() for rank in range(world_size)]
        mean, result = sum(values) / world_size, by_rank[0][0][index][0]
        assert all(torch.equal(found[index][0], result) for found, *_ in by_rank)
        lost = sum(found[index][1].double() for found, *_ in by_rank) / world_size
        largest = max(float(each.abs().max()) for each in values)
        assert (mean - result.double() - lost).abs().max() <= 16 * 2**-23 * largest
        assert (mean - result.double()).abs().max() <= 3 * largest * DIGIT_ERROR
    # What a ring of nodes sends, a byte and a 64th for each number.
    assert sum(sent for _, sent, _ in by_rank) / nodes == 2 * (nodes - 1) / nodes * EVEN * (1 + 1 / 64)
    weighted = sum("abc".index(host) for host in hosts) / world_size
    for *_, mean in by_rank:
        torch.testing.assert_close(mean, torch.full_like(mean, weighted), rtol=2 * DIGIT_ERROR + 2**-8, atol=0)


def _alike(rank, world_size, hosts):
    """A mean of what each node's ranks have alike."""
    comm = Communicator(hosts=hosts)
    values = _values(comm.topology.node_of[rank], 5000, torch.float32).to(device())
    lost = torch.full_like(values, math.nan)
    return NodeReduction(comm).between(values, torch.int8, lost).wait().cpu(), lost.cpu()


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_ranks_of_a_node_that_must_stay_alike_lose_the_same(pool, hosts):
    found = pool.run(_alike, len(hosts), list(hosts))
    nodes = ["ab".index(host) for host in hosts]
    values = [_values(node, 5000, torch.float32).double() for node in nodes]
    for rank, (result, lost) in enumerate(found):
        assert torch.equal(result, found[0][0])
        assert torch.equal(lost, found[nodes.index(nodes[rank])][1])
    off = sum(values) - sum(each.double() for _, each in found) - len(hosts) * found[0][0].double()
    assert off.abs().max() / len(hosts) <= 16 * 2**-23 * max(float(each.abs().max()) for each in values)


def _chains_of_uneven_nodes(rank, world_size):
    """A rank that only listens must be at the same collective as those that talk."""
    comm, naps = Communicator(hosts=list("aab")), random.Random(rank)
    mean = MeanOverRanks(comm, torch.int8)
    tensors = [torch.full((300 + 100 * index,), float(rank + index), device=device()) for index in range(20)]
    pending = []
    for tensor in tensors:
        time.sleep(naps.choice([0, 0, 0.003]))
        pending.append(mean(tensor))
    for each in pending:
        each.wait()
    return [tensor.cpu() for tensor in tensors]


def test_chains_of_uneven_nodes(pool):
    for tensors in pool.run(_chains_of_uneven_nodes, 3):
        for index, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor, torch.full_like(tensor, 1.0 + index), rtol=2 * 2**-8, atol=0)


def _huge(rank, world_size):
    values = torch.full((1000,), 3e38, device=device())
    return MeanOverRanks(Communicator(ranks_per_node=1), torch.int8)(values).wait().cpu()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_does_not_overflow_where_the_mean_would_not(pool, world_size):
    for mean in pool.run(_huge, world_size):
        assert (mean / 3e38 - 1).abs().max() <= 2 * DIGIT_ERROR

"""Every collective against what it says it does, among several ranks, in a subgroup, and where a rank is alone."""

import pytest
import torch
from models import device, narrow_sum_error

from accel_commhooks.comm.collectives import Communicator

NUMEL = 11


def _of(rank: int, numel: int = NUMEL) -> torch.Tensor:
    """What a rank has: whole numbers, which sums in any order give exactly."""
    return torch.arange(numel, dtype=torch.float32) * 6 + 60 * rank


def _mine(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return _of(rank, numel).to(device())


def _everything(rank, world_size):
    """The results of each collective among all ranks ("all") and of this rank by itself ("alone"), by name."""
    comm = Communicator(ranks_per_node=1)
    alone = comm.subgroup([[each] for each in range(world_size)])
    results = {}
    for name, group in (("all", comm.everyone), ("alone", alone)):
        size = group.size
        found = {
            "mean": comm.all_reduce(_mine(rank), group=group),
            "sum": comm.all_reduce(_mine(rank), mean=False, group=group),
            "narrow mean": comm.all_reduce(_mine(rank), group=group, wire_dtype=torch.bfloat16),
            "narrow sum": comm.all_reduce(_mine(rank), mean=False, group=group, wire_dtype=torch.bfloat16),
            "reduce_scatter": comm.reduce_scatter(_mine(0, 3), _mine(rank, 3 * size).view(size, 3), group=group),
            "reduce_scatter sum": comm.reduce_scatter(
                _mine(0, 3), _mine(rank, 3 * size).view(size, 3), mean=False, group=group
            ),
            "all_gather": comm.all_gather(_mine(0, size * 3), _mine(rank, 3), group=group),
            "broadcast": comm.broadcast(_mine(rank), source=size - 1, group=group),
        }
        results[name] = {what: pending.wait().cpu() for what, pending in found.items()}
    before = dict(comm.traffic.sent)
    comm.all_reduce(_mine(rank), group=alone).wait()
    assert dict(comm.traffic.sent) == before, "a rank alone sends nothing"
    results["all"]["maximum"] = comm.maximum(_mine(rank)).wait().cpu()
    sizes = [NUMEL - world_size + 1] + [1] * (world_size - 1)
    results["all"]["to owners"] = comm.reduce_to_owners(_mine(rank), sizes).wait().cpu()
    results["objects"] = comm.gather_objects({"rank": rank})
    results["true"] = comm.all_ranks_true(True), comm.all_ranks_true(rank == 0)
    group = comm.subgroup([range(world_size)])
    assert float(comm.all_reduce(torch.ones(1, device=device()), mean=False, group=group).wait()) == world_size
    comm.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective(pool, world_size):
    everyone = range(world_size)
    mean = sum(map(_of, everyone)) / world_size
    near = narrow_sum_error(torch.bfloat16, world_size)
    sizes = [NUMEL - world_size + 1] + [1] * (world_size - 1)
    for rank, results in enumerate(pool.run(_everything, world_size)):
        for group, ranks in (("all", list(everyone)), ("alone", [rank])):
            found, size = results[group], len(ranks)
            own_mean = sum(map(_of, ranks)) / size
            torch.testing.assert_close(found["mean"], own_mean)
            torch.testing.assert_close(found["sum"], own_mean * size)
            torch.testing.assert_close(found["narrow mean"], own_mean, rtol=near, atol=0)
            torch.testing.assert_close(found["narrow sum"], own_mean * size, rtol=near, atol=0)
            row = slice(3 * ranks.index(rank), 3 * ranks.index(rank) + 3)
            chunks = sum(_of(each, 3 * size) for each in ranks)[row]
            torch.testing.assert_close(found["reduce_scatter"], chunks / size)
            torch.testing.assert_close(found["reduce_scatter sum"], chunks)
            assert torch.equal(found["all_gather"], torch.cat([_of(each, 3) for each in ranks]))
            assert torch.equal(found["broadcast"], _of(ranks[-1]))
        assert torch.equal(results["all"]["maximum"], _of(world_size - 1))
        torch.testing.assert_close(results["all"]["to owners"], mean.split(sizes)[rank])
        assert results["objects"] == [{"rank": each} for each in everyone]
        assert results["true"] == (True, world_size == 1)


def _sparse(rank, world_size):
    comm = Communicator(ranks_per_node=1)
    tensor = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True, device=device())
    comm.all_reduce(tensor).wait()
    return tensor.to_dense().cpu(), sum(comm.traffic.sent.values())


def test_a_sparse_mean(pool):
    for dense, sent in pool.run(_sparse, 2):
        assert dense.tolist() == [0.5, 0.5, 0, 2]
        assert sent == 2 * (8 + 4), "everyone's indices and values are gathered"

"""Which ranks share a node, and means in two levels."""

import pytest
import torch
import torch.distributed as dist

from accel_commhooks import ConfigError
from accel_commhooks.comm import topology
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.comm.hierarchy import NodeReduction
from accel_commhooks.comm.topology import Topology
from accel_commhooks.comm.traffic import binomial_children


def test_nodes_by_host():
    found = Topology.from_keys(["a", "a", "b", "b", "a"])
    assert found.nodes == ((0, 1, 4), (2, 3))
    assert found.leaders == (0, 2)
    assert found.same_node(0, 4) and not found.same_node(1, 2)
    assert not found.is_even


def test_blocks_of_ranks():
    found = Topology.even(4, 2)
    assert found.nodes == ((0, 1), (2, 3)) and found.across == ((0, 2), (1, 3)) and found.is_even
    with pytest.raises(ConfigError, match="ranks_per_node must divide the number of ranks, but got 3 for 4 ranks"):
        Topology.even(4, 3)


def test_a_host_is_its_boot_and_its_network(monkeypatch):
    here = topology.host_key()
    assert "net:[" in here and len(here.split("/")[0]) == 36
    monkeypatch.setattr(topology.os, "readlink", lambda path: (_ for _ in ()).throw(OSError()))
    monkeypatch.setenv("GROUP_RANK", "3")
    assert topology.host_key().endswith("/3")


def _local(rank, world_size):
    return Communicator().topology.nodes


def test_ranks_here_share_a_node_whatever_the_devices(pool):
    one_gpu_each = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_NTASKS_PER_NODE": "1"}
    assert pool.run(_local, 3, environment=one_gpu_each) == [((0, 1, 2),)] * 3


def _two_levels(rank, world_size, keys):
    comm = Communicator()
    comm.topology = Topology.from_keys(keys)
    levels = NodeReduction(comm)
    tensor = torch.arange(7.0) * (rank + 1)
    expected = tensor.clone()
    dist.all_reduce(expected)
    expected /= world_size
    levels.inside(tensor).wait()
    levels.between(tensor).wait()
    return float((tensor - expected).abs().max())


@pytest.mark.parametrize("keys", ["abcd", "aabb", "aaab", "aaaa"])
def test_two_levels_are_one_mean(pool, keys):
    assert max(pool.run(_two_levels, 4, list(keys))) <= 1e-6


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_broadcast_reaches_everyone_once(size):
    reached = [child for position in range(size) for child in binomial_children(position, size)]
    assert sorted(reached) == list(range(1, size))


def _collectives(rank, world_size, wire):
    comm = Communicator(ranks_per_node=1)
    whole = torch.arange(12.0).view(world_size, -1) + rank
    own = torch.empty(12 // world_size)
    comm.reduce_scatter(own, whole.clone(), wire_dtype=wire).wait()
    mean = (torch.arange(12.0) + sum(range(world_size)) / world_size).view(world_size, -1)[rank]
    gathered = torch.empty(12)
    comm.all_gather(gathered, own).wait()
    given = torch.full((3,), float(rank))
    comm.broadcast(given, source=1).wait()
    to_owners = comm.reduce_to_owners(torch.full((6,), float(rank)), [4, 0, 2], wire_dtype=wire).wait()
    return (
        float((own - mean).abs().max()),
        gathered.tolist(),
        given.tolist(),
        to_owners.tolist(),
        dict(comm.traffic.sent),
    )


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_collectives_and_their_counts(pool, wire):
    world_size = 3
    results = pool.run(_collectives, world_size, wire)
    for off, gathered, given, _, sent in results:
        assert off <= (1e-6 if wire is None else 0.05)
        assert gathered == pytest.approx([i + 1.0 for i in range(12)], abs=1e-6 if wire is None else 0.05)
        assert given == [1.0] * 3
        # Each rank sends two of three chunks of four elements, directly to their owners.
        assert sent["reduce_scatter", "between"] == 2 * 4 * (4 if wire is None else 2)
        assert sent["all_gather", "between"] == 2 * 4 * 4
    assert [len(r[3]) for r in results] == [4, 0, 2]
    assert results[0][3] == pytest.approx([1.0] * 4, abs=0.01)
    assert results[1][4]["reduce_to_owners", "between"] == 6 * (4 if wire is None else 2)
    assert sum(r[4].get(("broadcast", "between"), 0) for r in results) == 2 * 3 * 4

"""What goes wrong has a name: errors of this package where files cannot be removed and ranks do not come to meet."""

import time
from unittest.mock import patch

import pytest
import torch.distributed as dist
from models import make_ddp, train

from accel_commhooks import CheckpointError, attach
from accel_commhooks.attachment import checkpoint
from accel_commhooks.comm import survivors
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.comm.roll_call import RollCall
from accel_commhooks.config.errors import LostRankError
from accel_commhooks.upstream import seams


def _save_where_nothing_can_be_removed(rank, world_size, folder, suffix):
    handle = attach(make_ddp(), "allreduce")
    file = checkpoint.save(handle, folder)
    before = file.read_bytes()
    if rank == 1:
        (file.with_name(file.name + suffix) / "something").mkdir(parents=True)
    handle.comm.gather_objects(None)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(handle, folder)
    return caught.value.text, before in [
        each.read_bytes() for each in file.parent.glob(f"{file.name}*") if each.is_file()
    ]


@pytest.mark.parametrize(("suffix", "doing"), [(".new", "write"), (".old", "rename")])
def test_a_folder_in_place_of_a_file_fails_the_save_on_all_ranks(pool, tmp_path, suffix, doing):
    for text, kept in pool.run(_save_where_nothing_can_be_removed, 2, str(tmp_path), suffix):
        assert f"rank 1 could not {doing} a file" in text and kept


def _one_does_not_answer(rank, world_size):
    call = RollCall(dist.group.WORLD, "anybody there?")
    call._timeout = 0.5
    if rank == 0:
        call.answer({})
        with pytest.raises(LostRankError, match=r"rank 1 did not attach a hook within 0.5 s"):
            call.everyone("attach a hook")
        with pytest.raises(LostRankError, match=r"rank 1 did not answer within 0.5 s"):
            call.wait_for(1)
    dist.barrier()


def test_a_rank_that_does_not_answer_a_roll_call_is_lost(pool):
    pool.run(_one_does_not_answer, 2)


def _the_store_is_cut_off(rank, world_size):
    group = Communicator(ranks_per_node=1).everyone
    with (
        patch.object(RollCall, "wait_a_while", lambda call, seconds: time.sleep(60)),
        patch.object(survivors, "ANSWER_SECONDS", 0.1),
    ):
        started = time.monotonic()
        text = rf"the store .* does not answer: rank {rank}, this one, is cut off"
        with pytest.raises(LostRankError, match=text), survivors.lost_ranks_named(group):
            raise RuntimeError("timed out")
        assert time.monotonic() - started < 30


def test_a_rank_that_is_cut_off_from_the_store_does_not_wait_for_it(pool):
    pool.run(_the_store_is_cut_off, 2)


def _fails(*args, **kwargs):
    raise RuntimeError("wait timeout after 4000ms")


def _meeting_fails(rank, world_size):
    real, dist.new_group = dist.new_group, _fails
    try:
        with pytest.raises(LostRankError, match="wait timeout"):
            Communicator(ranks_per_node=1).subgroup([[0, 1]])
    finally:
        dist.new_group = real


def test_a_group_that_cannot_be_made_is_a_lost_rank(pool):
    pool.run(_meeting_fails, 2)


def _rebuilding_fails(rank, world_size):
    ddp = make_ddp()
    attach(ddp, "allreduce")
    train(ddp, rank, 1)
    assert not ddp._has_rebuilt_buckets
    real, seams.rebuild_buckets = seams.rebuild_buckets, _fails
    try:
        with pytest.raises(LostRankError, match="wait timeout"):
            train(ddp, rank, 1)
    finally:
        seams.rebuild_buckets = real
    train(ddp, rank, 1)
    assert ddp._has_rebuilt_buckets and not ddp.reducer._rebuild_buckets(), "once, before DDP's forward does it"


def test_ddp_rebuilds_its_buckets_where_a_lost_rank_is_named(pool):
    pool.run(_rebuilding_fails, 2)

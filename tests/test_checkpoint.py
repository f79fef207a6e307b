"""Hook state on disk: whole or absent, and a rule for every kind of mismatch."""

import copy
import gc
import logging

import pytest
import torch
from combinations.subjects import Branching
from models import Net, distance, loss_of, make_ddp, train, weights

from accel_commhooks import attach
from accel_commhooks.attachment import checkpoint


def _save(rank, world_size, folder, name, options, steps=4):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, name, **options)
    train(ddp, rank, steps)
    checkpoint.save(handle, folder)
    return handle.state_dict()


def _load(rank, world_size, folder, name, options):
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    log = logging.getLogger("accel_commhooks")
    keep = Keep()
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    try:
        handle = attach(make_ddp(Net(32)), name, **options)
        loaded = checkpoint.load(handle, folder)
    finally:
        log.removeHandler(keep)
    return loaded, records, handle.state_dict()


POWERSGD = {"start_powerSGD_iter": 1}


def test_same_world_size_is_exact(pool, tmp_path):
    saved = pool.run(_save, 2, str(tmp_path), "powersgd", POWERSGD)
    for rank, (loaded, records, state) in enumerate(pool.run(_load, 2, str(tmp_path), "powersgd", POWERSGD)):
        assert loaded and not records
        assert state["step"] == 4
        for kind in ("q", "error"):
            assert state[kind].keys() == saved[rank][kind].keys()
            assert all(torch.equal(state[kind][n], saved[rank][kind][n]) for n in state[kind])
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1)])
def test_another_world_size_keeps_the_mean_residual(pool, tmp_path, before, after):
    saved = pool.run(_save, before, str(tmp_path), "powersgd", POWERSGD)
    restored = pool.run(_load, after, str(tmp_path), "powersgd", POWERSGD)
    assert f"was saved by {before} ranks and is restored on {after}" in restored[0][1][0]
    assert all(not records for _, records, _ in restored[1:]), "rank 0 alone says so"
    for name in saved[0]["error"]:
        mean_before = sum(state["error"][name] for state in saved) / before
        mean_after = sum(state["error"][name] for _, _, state in restored) / after
        assert mean_before.abs().max() > 0
        assert torch.allclose(mean_before, mean_after, atol=1e-7)


def test_what_cannot_be_used_starts_anew_on_every_rank(pool, tmp_path):
    def reason(folder, name="powersgd", options=POWERSGD):
        results = pool.run(_load, 2, str(folder), name, options)
        assert [loaded for loaded, _, _ in results] == [False, False]
        assert results[1][1] == []
        return results[0][1][0]

    assert "it does not exist" in reason(tmp_path / "nowhere")
    (tmp_path / "plain").mkdir()
    assert "the checkpoint was made without a hook" in reason(tmp_path / "plain")
    pool.run(_save, 2, str(tmp_path / "other"), "bf16_compress", {})
    assert "it holds the state of 'bf16_compress'" in reason(tmp_path / "other")
    pool.run(_save, 2, str(tmp_path / "broken"), "powersgd", POWERSGD)
    file = tmp_path / "broken" / "comm_hook" / "rank_00001.pt"
    file.write_bytes(file.read_bytes()[:100])
    # Rank 0 could read its own, but all must decide alike.
    assert "another rank could not read its part" in reason(tmp_path / "broken")
    file.unlink()
    assert "another rank could not read its part" in reason(tmp_path / "broken")
    torch.save({"format": 99}, tmp_path / "broken" / "comm_hook" / "rank_00000.pt")
    assert "a format that this version does not know" in reason(tmp_path / "broken")


def _crash(rank, world_size, folder):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    train(ddp, rank, 3)
    file = checkpoint.save(handle, folder)
    before = file.read_bytes()
    handle.state_dict = lambda: {"step": 3, "bad": lambda: None}  # cannot be written
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(handle, folder)
    return file.read_bytes() == before


def test_a_failed_save_leaves_the_old_state(pool, tmp_path):
    assert pool.run(_crash, 2, str(tmp_path)) == [True, True]
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_models_in_one_checkpoint(pool, tmp_path):
    pool.run(_two_models, 2, str(tmp_path))
    assert (tmp_path / "comm_hook" / "rank_00000.pt").exists() and (tmp_path / "comm_hook_1" / "rank_00001.pt").exists()


def _two_models(rank, world_size, folder):
    for index in range(2):
        handle = attach(make_ddp(Net(32)), "powersgd", **POWERSGD)
        checkpoint.save(handle, folder, index=index)


# Gradients that were discarded.


def _discard(ddp, rank, optimizer, set_to_none):
    (50 * loss_of(ddp, rank, 90)).backward()
    optimizer.zero_grad(set_to_none=set_to_none)


def _restored(handle, ddp, optimizer, saved):
    handle.load_state_dict(saved["hook"])
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def _saved(handle, ddp, optimizer):
    return copy.deepcopy(
        {"hook": handle.state_dict(), "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    )


def _discard_after_going_back(rank, world_size):
    """Steps with the first discarded gradients, taken back and taken again, in one process."""
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    optimizer = train(ddp, rank, 4)
    saved = _saved(handle, ddp, optimizer)
    ends = []
    for _ in range(8):
        gc.collect()  # what is new may get the place, and the id, of what was there before
        _restored(handle, ddp, optimizer, saved)
        _discard(ddp, rank, optimizer, True)
        train(ddp, rank, 3, optimizer=optimizer, first=4)
        ends.append(weights(ddp))
    return max(distance(ends[0], end) for end in ends)


def test_going_back_forgets_copies_of_residuals(pool):
    assert pool.run(_discard_after_going_back, 2) == [0, 0]


def _save_after_discard(rank, world_size, set_to_none):
    """A save between gradients that were discarded and the next backward; then on, and from the save in a new model."""
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    optimizer = train(ddp, rank, 4)
    _discard(ddp, rank, optimizer, set_to_none)
    saved = _saved(handle, ddp, optimizer)
    train(ddp, rank, 3, optimizer=optimizer, first=4)
    other = make_ddp(Net(32), seed=1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    _restored(attach(other, "powersgd", **POWERSGD), other, other_optimizer, saved)
    train(other, rank, 3, optimizer=other_optimizer, first=4)
    return distance(weights(ddp), weights(other))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_discarded_gradients_are_not_saved(pool, set_to_none):
    # A new wrapper has other buckets in its first step, which changes roundings of gradients of order one, times the rate 0.1.
    assert max(pool.run(_save_after_discard, 2, set_to_none)) <= 1e-6


def _back_before_local_steps(rank, world_size):
    """Local steps, in which DDP sleeps, and back to a step in which it reduces: a part was used in the former alone."""
    model = Branching()
    ddp = make_ddp(model, find_unused_parameters=True)
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=2, period=3, subgroup="none")
    model.branch = 2
    optimizer = train(ddp, rank, 1)
    saved = _saved(handle, ddp, optimizer)
    ends = []
    for _ in range(2):
        _restored(handle, ddp, optimizer, saved)
        model.branch = 2
        train(ddp, rank, 1, optimizer=optimizer, first=1)
        model.branch = rank
        train(ddp, rank, 3, optimizer=optimizer, first=2)
        ends.append(weights(ddp))
    return distance(*ends)


def test_back_from_local_steps_to_those_before(pool):
    assert pool.run(_back_before_local_steps, 2) == [0, 0]

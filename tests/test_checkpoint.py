"""Hook state on disk: whole or absent, and a rule for every kind of mismatch."""

import logging

import pytest
import torch
from models import Net, make_ddp, train

from accel_commhooks import CheckpointError, attach
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


def _crash(rank, world_size, folder):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    train(ddp, rank, 3)
    file = checkpoint.save(handle, folder)
    before = file.read_bytes()
    state = handle.state_dict()
    handle.state_dict = lambda: {**state, "bad": (lambda: None) if rank == 1 else 0}  # cannot be written, on one rank
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(handle, folder)
    return file.read_bytes() == before, caught.value.text


def test_a_failed_save_is_told_to_all_and_leaves_the_old_state(pool, tmp_path):
    for unchanged, text in pool.run(_crash, 2, str(tmp_path)):
        assert unchanged
        assert "rank 1 could not write a file" in text and "pickle" in text
    assert sorted(f.name for f in tmp_path.rglob("*") if f.is_file()) == ["rank_00000.pt", "rank_00001.pt"]


def test_two_models_in_one_checkpoint(pool, tmp_path):
    pool.run(_two_models, 2, str(tmp_path))
    assert (tmp_path / "comm_hook" / "rank_00000.pt").exists() and (tmp_path / "comm_hook_1" / "rank_00001.pt").exists()


def _two_models(rank, world_size, folder):
    for index in range(2):
        handle = attach(make_ddp(Net(32)), "powersgd", **POWERSGD)
        checkpoint.save(handle, folder, index=index)

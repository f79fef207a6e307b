"""Hook state on disk: whole or absent, and a rule for every kind of mismatch."""

import copy
import gc
import logging
from unittest.mock import patch

import pytest
import torch
from combinations.subjects import Branching
from models import Net, PlantedFailure, distance, loss_of, make_ddp, train, weights

from accel_commhooks import CheckpointError, attach
from accel_commhooks.attachment import checkpoint, rank_files
from accel_commhooks.config import errors


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


# Damaged, torn and mixed saves: all ranks take the same whole one, or none, and rank 0 says why.


def _saves(rank, world_size, folder, steps):
    """Several saves into one folder; returns the state of each."""
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    states = []
    for first in range(0, steps, 2):
        train(ddp, rank, 2, first=first)
        checkpoint.save(handle, folder)
        states.append(handle.state_dict())
    return states


def _damage(kind, folder, other=None):
    """What happens to rank 1's file."""
    file, neighbour = folder / "comm_hook" / "rank_00001.pt", folder / "comm_hook" / "rank_00000.pt"
    content = file.read_bytes()
    if kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "garbage":
        file.write_bytes(bytes(range(256)) * 20)
    elif kind == "flipped":
        place = content.index(torch.load(file, weights_only=True)["state"]["error"]["first.weight"].numpy().tobytes())
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif kind == "missing":
        file.unlink()
    elif kind == "swapped":
        file.write_bytes(neighbour.read_bytes())
        neighbour.write_bytes(content)
    elif kind == "another run's":
        file.write_bytes((other / "comm_hook" / "rank_00001.pt").read_bytes())
    elif kind == "incomplete":
        torch.save({"format": 2, "state": {}}, file)
    elif kind == "another format":
        torch.save({"format": 99}, file)


REASONS = {
    "truncated": "rank_00001.pt is damaged",
    "empty": "rank_00001.pt is damaged",
    "garbage": "rank_00001.pt is damaged",
    "flipped": "rank 1: rank_00001.pt is damaged: its content does not have the digest that was written",
    "missing": "the save of step 4 by 2 ranks is torn: there is no file of rank 1",
    "swapped": "rank_00001.pt holds the state of rank 0",
    "another run's": "is torn: there is no file of rank 1",
    "incomplete": "rank_00001.pt is damaged: it lacks hook",
    "another format": "rank_00001.pt has a format that this version does not know",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_damaged_file_on_one_rank_is_no_state_for_anyone(pool, tmp_path, kind):
    pool.run(_save, 2, str(tmp_path / "a"), "powersgd", POWERSGD)
    pool.run(_save, 2, str(tmp_path / "b"), "powersgd", POWERSGD)
    _damage(kind, tmp_path / "a", tmp_path / "b")
    results = pool.run(_load, 2, str(tmp_path / "a"), "powersgd", POWERSGD)
    assert [(loaded, state["step"]) for loaded, _, state in results] == [(False, 0), (False, 0)]
    assert REASONS[kind] in results[0][1][0] and results[1][1] == []


def test_these_tests_can_fail(own_pool, tmp_path):
    """Planted: a digest that is not compared."""
    own_pool.run(_save, 2, str(tmp_path), "powersgd", POWERSGD)
    _damage("flipped", tmp_path)
    assert [loaded for loaded, _, _ in own_pool.run(_load_blindly, 2, str(tmp_path))] == [True, True]


def _load_blindly(rank, world_size, folder):
    with patch.object(rank_files, "digest_of", lambda state: "same"), patch.object(rank_files, "_load", _same_digest):
        return _load(rank, world_size, folder, "powersgd", POWERSGD)


def _same_digest(file, **how):
    return {**torch.load(file, weights_only=True, **how), "digest": "same"}


@pytest.mark.parametrize("stage", ["written", "renamed by one", "renamed by all"])
def test_a_save_that_is_cut_short_leaves_a_whole_one(own_pool, tmp_path, stage):
    """The files as they are when a rank is killed in a stage of the second of two saves."""
    folder = tmp_path / "comm_hook"
    first, second = own_pool.run(_saves, 2, str(tmp_path / "aside"), 4)[0]
    own_pool.run(_cut_short, 2, str(tmp_path), stage)
    assert sorted(file.name for file in folder.iterdir()) != ["rank_00000.pt", "rank_00001.pt"]
    results = own_pool.run(_load, 2, str(tmp_path), "powersgd", POWERSGD)
    assert all(loaded for loaded, _, _ in results)
    assert len({state["step"] for _, _, state in results}) == 1
    whole = {2: first, 4: second}[results[0][2]["step"]]
    assert torch.equal(results[0][2]["error"]["first.weight"], whole["error"]["first.weight"])
    # The next save clears up.
    own_pool.run(_saves, 2, str(tmp_path), 2)
    assert sorted(file.name for file in folder.iterdir()) == ["rank_00000.pt", "rank_00001.pt"]


def _cut_short(rank, world_size, folder, stage):
    """The second save ends in the middle, on all ranks: nobody is told to clear up."""
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    train(ddp, rank, 2)
    checkpoint.save(handle, folder)
    train(ddp, rank, 2, first=2)
    gather, rename = rank_files._all_well, rank_files._take_its_place

    def fail(*args):
        raise PlantedFailure

    def all_well(comm, problem, where, doing, file):
        if doing == "rename":
            raise PlantedFailure
        gather(comm, problem, where, doing, file)

    stages = {
        "written": {"_all_well": fail},
        "renamed by one": {"_take_its_place": rename if rank == 0 else fail, "_all_well": all_well},
        "renamed by all": {"_all_well": all_well},
    }
    with patch.multiple(rank_files, **stages[stage]), pytest.raises(PlantedFailure):
        checkpoint.save(handle, folder)


def test_a_torn_save_falls_back_to_the_whole_one_before(own_pool, tmp_path):
    own_pool.run(_cut_short, 2, str(tmp_path), "renamed by all")
    # Rank 1 is killed and its new file lost with its disk's cache: only its old one is left.
    (tmp_path / "comm_hook" / "rank_00001.pt.old").replace(tmp_path / "comm_hook" / "rank_00001.pt")
    results = own_pool.run(_load, 2, str(tmp_path), "powersgd", POWERSGD)
    assert [(loaded, state["step"]) for loaded, _, state in results] == [(True, 2), (True, 2)]
    assert "goes on from the save of step 2, the newest complete one" in results[0][1][0]
    assert "the save of step 4 by 2 ranks is torn: there is no file of rank 1" in results[0][1][0]


def test_four_ranks_then_two_then_four_in_one_folder(pool, tmp_path):
    pool.run(_save, 4, str(tmp_path), "powersgd", POWERSGD, 4)
    two = pool.run(_save, 2, str(tmp_path), "powersgd", POWERSGD, 6)
    results = pool.run(_load, 4, str(tmp_path), "powersgd", POWERSGD)
    assert [(loaded, state["step"]) for loaded, _, state in results] == [(True, 6)] * 4
    assert "was saved by 2 ranks and is restored on 4" in " ".join(results[0][1])
    mean = sum(state["error"]["first.weight"] for state in two) / 2
    assert all(torch.allclose(state["error"]["first.weight"], mean, atol=1e-7) for _, _, state in results)
    four = pool.run(_save, 4, str(tmp_path), "powersgd", POWERSGD, 8)
    results = pool.run(_load, 4, str(tmp_path), "powersgd", POWERSGD)
    for (loaded, records, state), saved in zip(results, four, strict=True):
        assert loaded and not records
        assert torch.equal(state["error"]["first.weight"], saved["error"]["first.weight"])


@pytest.mark.parametrize("name", ["powersgd", "post_localsgd", "zero_overlap"])
def test_the_state_of_another_model_is_refused(pool, tmp_path, name):
    options = {"powersgd": POWERSGD, "post_localsgd": LOCAL, "zero_overlap": {"wire_dtype": "bf16"}}[name]
    pool.run(_save_wide, 2, str(tmp_path), name, options)
    results = pool.run(_load, 2, str(tmp_path), name, options)
    assert [loaded for loaded, _, _ in results] == [False, False]
    assert (
        "it was made for another model: 'embed.weight' has shape [20, 48] there and [20, 32] here" in results[0][1][0]
    )


def _save_wide(rank, world_size, folder, name, options):
    ddp = make_ddp(Net(48))
    handle = attach(ddp, name, **options)
    train(ddp, rank, 4)
    handle.prepare_save()
    checkpoint.save(handle, folder)


LOCAL = {"start_localSGD_iter": 1, "period": 3, "subgroup": "none", "outer": {"name": "nesterov"}}


def _saved_again(rank, world_size, folder):
    """Loaded and saved again before the first forward."""
    handle = attach(make_ddp(Net(32)), "post_localsgd", **LOCAL)
    assert checkpoint.load(handle, folder)
    handle.open_consensus()
    handle.prepare_save()
    checkpoint.save(handle, folder)
    return handle.state_dict()


def test_a_save_right_after_a_load_is_whole(pool, tmp_path):
    saved = pool.run(_save, 2, str(tmp_path), "post_localsgd", LOCAL)
    again = pool.run(_saved_again, 2, str(tmp_path))
    for before, after in zip(saved, again, strict=True):
        assert before["replicas"]["anchor"] and before["replicas"]["momentum"]
        assert rank_files.digest_of(before) == rank_files.digest_of(after)


def _other_weights(rank, world_size, folder, same):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_commhooks").addHandler(handler)
    errors._warned.clear()
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    train(ddp, rank, 2)
    checkpoint.save(handle, folder)
    kept = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, rank, 2, first=2)
    checkpoint.load(handle, folder)
    if same:
        ddp.module.load_state_dict(kept)
    train(ddp, rank, 1, first=2)
    logging.getLogger("accel_commhooks").removeHandler(handler)
    return [text for text in records if "weights" in text]


def test_weights_of_another_step_are_told(pool, tmp_path):
    assert pool.run(_other_weights, 2, str(tmp_path), True) == [[], []]
    told, silent = pool.run(_other_weights, 2, str(tmp_path), False)
    assert len(told) == 1 and not silent
    assert "does not have the weights with which the state of hook 'powersgd' was saved at step 2" in told[0]


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


def _read_in_mid_step(rank, world_size, read):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        if read:
            handle.state_dict()
        optimizer.step()
    return weights(ddp), handle.state_dict()["compressed_steps"]


def test_a_state_that_is_read_in_mid_step_does_not_change_the_step(pool):
    for (plain, steps), (after_reading, same_steps) in zip(
        pool.run(_read_in_mid_step, 2, False), pool.run(_read_in_mid_step, 2, True), strict=True
    ):
        assert steps == same_steps > 0
        assert distance(plain, after_reading) == 0


def _read_on_one_rank(rank, world_size):
    """A gradient of zero, whose state one rank alone reads before the step."""
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", **POWERSGD)
    optimizer = train(ddp, rank, 1)
    optimizer.zero_grad()
    (0 * loss_of(ddp, rank, 1)).backward()
    if rank == 0:
        handle.state_dict()
    optimizer.step()
    return handle.steps


def test_a_step_with_a_gradient_of_zero_counts_on_the_rank_that_reads_its_state(pool):
    assert pool.run(_read_on_one_rank, 2) == [2, 2]


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

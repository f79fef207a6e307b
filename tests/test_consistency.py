"""What all ranks must hold in common is compared while training runs, and before every save."""

import logging

import pytest
import torch
import torch.distributed as dist
from models import Net, distance, loss_of, make_ddp, train, weights

from accel_commhooks import DisagreementError, attach
from accel_commhooks.attachment import checkpoint, consistency
from accel_commhooks.comm.checksum import checksum, checksum_of_all

HOOKS = {
    "allreduce": {},
    "bf16_compress": {},
    "int8_compress": {},
    "powersgd": {"start_powerSGD_iter": 1},
    "batched_powersgd": {"start_powerSGD_iter": 1, "alternate": True},
    "post_localsgd": {"start_localSGD_iter": 1, "period": 2, "subgroup": "none", "outer": {"name": "nesterov"}},
    "zero_overlap": {},
}
EVERY = 4
every_hook = pytest.mark.parametrize("name", HOOKS)


# The checksum.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(1,), (7,), (1024,), (33, 77), (3, 5, 7), (9000,)])
def test_every_bit_counts_and_every_place(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    before = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == before
    flat = tensor.view(-1).view(torch.uint8)
    for position in {0, len(flat) // 2, len(flat) - 1}:
        flat[position] ^= 1
        assert int(checksum(tensor)) != before
        flat[position] ^= 1
    if tensor.numel() > 2:
        moved = tensor.view(-1)
        moved[0], moved[-1] = moved[-1].clone(), moved[0].clone()
        assert int(checksum(tensor)) != before or moved[0] == moved[-1]


def test_the_checksum_is_of_values_and_not_of_memory():
    tensor = torch.rand(3, 4, 5, 6)
    assert int(checksum(tensor.to(memory_format=torch.channels_last))) == int(checksum(tensor))
    inside = torch.rand(101)
    assert int(checksum(inside[1:])) == int(checksum(inside[1:].clone())), "it does not depend on alignment"
    a, b = torch.rand(4), torch.rand(4)
    cpu = torch.device("cpu")
    assert int(checksum_of_all([a, b], cpu)) != int(checksum_of_all([b, a], cpu))


# Differences.


def _flip_a_bit(tensor):
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


# Where a difference lasts: elsewhere the next gather, factor or averaging makes the ranks equal again by itself.
LASTING = {"post_localsgd": "anchor"}
EVERY_STEP = {"zero_overlap", "factor"}


def _planting(handle, ddp, rank, name, plant):
    """What flips a bit on the last rank after step 3, or after each from there on."""

    def on_step(step):
        if step == 3:
            handle.synchronize()
        again = step > 3 and (name in EVERY_STEP or plant in EVERY_STEP)
        if plant == "nothing" or rank != handle.comm.size - 1 or not (step == 3 or again):
            return
        kinds = {"weight": "weights", "anchor": "anchor", "factor": "factor q"}
        _flip_a_bit(next(iter(handle.hook.common()[kinds[plant]].values())))

    return on_step


def _one_bit(rank, world_size, name, plant):
    """One rank differs from the others in the last bit of one number."""
    ddp = make_ddp(Net(32))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, name, optimizer=optimizer, check_every=EVERY, **HOOKS[name])
    error = None
    try:
        train(ddp, rank, 4 * EVERY, optimizer=optimizer, on_step=_planting(handle, ddp, rank, name, plant))
    except DisagreementError as caught:
        error = caught.text
    return error, handle.steps, dict(handle.comm.traffic.calls)


@every_hook
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_bit_is_found_on_all_ranks(pool, name, world_size):
    for error, steps, _ in pool.run(_one_bit, world_size, name, LASTING.get(name, "weight")):
        assert error is not None and f"rank {world_size - 1} and rank 0 hold different values" in error
        assert "first in the weights of 'embed.weight'" in error
        assert steps <= 4 + 2 * EVERY + 1, "within two periods"


def test_a_hooks_own_state_is_compared_too(pool):
    for error, _, _ in pool.run(_one_bit, 2, "powersgd", "factor"):
        assert error is not None and "factor q" in error


@every_hook
def test_ranks_that_agree_are_not_disturbed(pool, name):
    for error, steps, calls in pool.run(_one_bit, 3, name, "nothing"):
        assert error is None and steps == 4 * EVERY
        assert calls["all_reduce"] >= 3, "it was compared"


def _blind(rank, world_size):
    """Planted: a checksum that sees nothing."""
    real, consistency.checksum_of_all = (
        consistency.checksum_of_all,
        lambda tensors, device: torch.zeros((), dtype=torch.int64),
    )
    try:
        return _one_bit(rank, world_size, "allreduce", "weight")[0]
    finally:
        consistency.checksum_of_all = real


def test_these_tests_can_fail(pool):
    assert pool.run(_blind, 2) == [None, None]


def test_zero_switches_it_off(pool):
    assert [error for error, _, _ in pool.run(_switched_off, 2)] == [None, None]


def _switched_off(rank, world_size):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "allreduce", check_every=0)
    if rank == 1:
        _flip_a_bit(ddp.module.first.weight)
    train(ddp, rank, 8)
    handle.prepare_save()
    return None, handle.steps, {}


# A step that one rank leaves out.


def _left_out(rank, world_size):
    ddp = make_ddp(Net(32))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "powersgd", check_every=EVERY, start_powerSGD_iter=1)
    with pytest.raises(DisagreementError) as caught:
        for step in range(4 * EVERY):
            loss_of(ddp, rank, step).backward()
            if not (rank == 1 and step == 3):  # as after `if loss.isfinite():` with a loss of its own
                optimizer.step()
            optimizer.zero_grad()
    assert handle.steps > 4
    return caught.value.text


def test_a_step_that_one_rank_left_out_is_told(pool):
    for text in pool.run(_left_out, 2):
        assert "rank 1 and rank 0 hold different values" in text and "number of steps" in text


# Repair.


def _repaired(rank, world_size, name):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_commhooks").addHandler(handler)
    ddp = make_ddp(Net(32))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    options = {"check_every": EVERY, "on_disagreement": "repair", **HOOKS[name]}
    handle = attach(ddp, name, optimizer=optimizer, **options)
    plant = _planting(handle, ddp, rank, name, LASTING.get(name, "weight"))
    train(ddp, rank, 4 + EVERY, optimizer=optimizer, on_step=plant)
    train(ddp, rank, 5 * EVERY - 4, optimizer=optimizer, first=4 + EVERY)
    handle.synchronize()
    handle.prepare_save()
    logging.getLogger("accel_commhooks").removeHandler(handler)
    moments = {n: s["exp_avg"] for n, s in optimizer.state_dict()["state"].items() if "exp_avg" in s}
    return weights(ddp), moments, records, handle.steps


@every_hook
def test_repair_goes_on_with_what_rank_0_has(pool, name):
    (first, moments, records, steps), (second, others, _, _) = pool.run(_repaired, 2, name)
    assert steps == 6 * EVERY
    assert len([r for r in records if "all ranks go on with what rank 0 has" in r]) == 1, "once is enough"
    assert distance(first, second) == 0
    if name not in ("post_localsgd", "zero_overlap"):  # there ranks keep state of their own
        assert distance({str(k): v for k, v in moments.items()}, {str(k): v for k, v in others.items()}) == 0


# Scripts that let replicas differ.


def _own_business(rank, world_size):
    """Steps under no_sync: the script averages by itself, or not at all."""
    ddp = make_ddp(Net(32))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "allreduce", check_every=2)
    for step in range(3):
        with ddp.no_sync():
            loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.prepare_save()
    train(ddp, rank, 6, optimizer=optimizer)
    return weights(ddp)


def test_replicas_that_the_script_trains_apart_are_its_own_business(pool):
    first, second = pool.run(_own_business, 2)
    assert distance(first, second) > 0


# Saves.


def _at_save(rank, world_size, folder):
    ddp = make_ddp(Net(32))
    handle = attach(ddp, "powersgd", start_powerSGD_iter=1)
    train(ddp, rank, 2)
    handle.prepare_save()
    checkpoint.save(handle, folder)
    if rank == 1:
        _flip_a_bit(ddp.module.first.weight)
    dist.barrier()
    with pytest.raises(DisagreementError) as caught:
        handle.prepare_save()
    return caught.value.text


def test_a_save_compares_at_once(pool, tmp_path):
    for text in pool.run(_at_save, 2, str(tmp_path)):
        assert "rank 1 and rank 0 hold different values" in text and "weights of 'first.weight'" in text

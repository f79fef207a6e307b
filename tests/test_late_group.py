"""The late group finds races that Gloo forgives: each is planted here, and caught."""

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from late_group import LateGroupError, compare_orders
from models import loss_of, make_ddp, train, weights
from ranks import RankError, RankPool, Setting

from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.verify.run import verify

ELEMENTS = 1000


@pytest.fixture(scope="module")
def late_pool():
    ranks = RankPool(setting=Setting("late"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def gloo_pool():
    ranks = RankPool(setting=Setting())
    yield ranks
    ranks.stop()


# It does what a group does.


def _collectives(rank, world_size):
    assert dist.get_backend() == dist.group.WORLD.name() or dist.get_backend() == "gloo"
    results = {}
    for op in ("SUM", "MAX"):
        results[op] = torch.full((4,), float(rank + 1))
        dist.all_reduce(results[op], getattr(dist.ReduceOp, op))
    results["broadcast"] = torch.full((3,), rank)
    dist.broadcast(results["broadcast"], 1)
    results["all_gather"] = [torch.zeros(2) for _ in range(world_size)]
    dist.all_gather(results["all_gather"], torch.full((2,), float(rank)))
    results["all_gather_single"] = torch.zeros(world_size * 2)
    dist.all_gather_single(results["all_gather_single"], torch.full((2,), float(rank)))
    results["reduce_scatter"] = torch.zeros(2)
    dist.reduce_scatter_single(results["reduce_scatter"], torch.arange(2.0 * world_size) + rank)
    results["all_to_all"] = torch.zeros(world_size)
    dist.all_to_all_single(results["all_to_all"], torch.arange(float(world_size)) + 10 * rank)
    splits = [1] * (world_size - 1) + [3]
    mine = splits[rank]
    results["uneven"] = torch.zeros(mine * world_size)
    dist.all_to_all_single(results["uneven"], torch.arange(float(sum(splits))) + rank, [mine] * world_size, splits)
    owned = torch.full((2,), float(rank))
    dist.reduce(owned, 0)
    results["reduce"] = owned if rank == 0 else None
    results["objects"] = [None] * world_size
    dist.all_gather_object(results["objects"], {"rank": rank})
    results["list"] = [rank, "text"]
    dist.broadcast_object_list(results["list"], 1)
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True)
    dist.all_reduce(sparse)
    results["sparse"] = sparse.to_dense()
    half = torch.full((4,), float(rank)).bfloat16()
    dist.all_reduce(half)
    results["half"] = half
    group = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        results["subgroup"] = torch.ones(2)
        dist.all_reduce(results["subgroup"], group=group)
    dist.barrier()
    return results


def _flat(value):
    if torch.is_tensor(value):
        return value.tolist()
    return [_flat(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_gloo(late_pool, gloo_pool, world_size):
    late, gloo = (pool.run(_collectives, world_size) for pool in (late_pool, gloo_pool))
    for mine, reference in zip(late, gloo, strict=True):
        assert {k: _flat(v) for k, v in mine.items()} == {k: _flat(v) for k, v in reference.items()}


def _mean(rank, world_size):
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensor.tolist()


def test_a_mean_which_gloo_does_not_have(late_pool):
    assert late_pool.run(_mean, 3) == [[1.0] * 4] * 3


def _ddp(rank, world_size):
    ddp = make_ddp(find_unused_parameters=True, init_sync=True)
    train(ddp, rank, 4, accumulation=2)
    return weights(ddp)


def test_plain_ddp_trains_on_it(late_pool, gloo_pool):
    late, gloo = late_pool.run(_ddp, 2), gloo_pool.run(_ddp, 2)
    for name, weight in late[0].items():
        assert torch.equal(weight, gloo[0][name]) and torch.equal(weight, late[1][name]), name


def _lateness(rank, world_size):
    """Works complete in the order of issue, and not at once."""
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(20)]
    early = sum(work.is_completed() for work in works)
    works[-1].wait()
    return early, all(work.is_completed() for work in works)


def test_collectives_complete_late_and_in_order(late_pool):
    with pytest.raises(RankError, match="freed while it was in flight"):  # nobody kept these tensors
        late_pool.run(_lateness, 2)


def _kept(rank, world_size):
    tensors = [torch.ones(4) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    early = sum(work.is_completed() for work in works)
    works[-1].wait()
    return early, all(work.is_completed() for work in works), tensors[0].isnan().all().item()


def test_only_what_is_waited_for_appears(late_pool):
    for early, all_complete, first_is_hidden in late_pool.run(_kept, 2):
        assert early < 20
        assert all_complete and first_is_hidden


# Races.


def _read_before_wait(rank, world_size):
    tensor = torch.full((ELEMENTS,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(0.1)  # long enough for Gloo
    seen = tensor.sum().item()
    work.wait()
    return seen


def test_a_read_before_the_wait_sees_nothing_and_passes_on_gloo(late_pool, gloo_pool):
    assert gloo_pool.run(_read_before_wait, 2) == [ELEMENTS, ELEMENTS]
    assert all(seen != seen for seen in late_pool.run(_read_before_wait, 2))


def _write_into_what_is_sent(rank, world_size):
    chunk, out = torch.full((ELEMENTS,), float(rank)), torch.empty(world_size * ELEMENTS)
    work = dist.all_gather_single(out, chunk, async_op=True)
    time.sleep(0.1)
    chunk.zero_()
    work.wait()
    return out.sum().item()


def test_a_write_into_what_is_sent_is_caught_and_passes_on_gloo(late_pool, gloo_pool):
    assert gloo_pool.run(_write_into_what_is_sent, 2) == [ELEMENTS, ELEMENTS]
    with pytest.raises(RankError, match=r"written to while it was sent: all_gather\(1000.*test_late_group.py:\d+"):
        late_pool.run(_write_into_what_is_sent, 2)


def _write_into_what_is_received(rank, world_size):
    tensor = torch.full((ELEMENTS,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    tensor[3] = 0
    try:
        work.wait()
    except LateGroupError as error:
        return str(error)  # and the test's end tells it once more
    return None


def test_a_write_into_what_is_received_is_caught(late_pool):
    with pytest.raises(RankError, match="written to while it was received: all_reduce"):
        late_pool.run(_write_into_what_is_received, 2)


def _never_waited_for(rank, world_size, kept=[]):  # noqa: B006 - it outlives the function
    tensor = torch.full((ELEMENTS,), float(rank))
    kept.append((tensor, dist.all_reduce(tensor, async_op=True)))
    tensor.add_(1)


def test_a_write_is_caught_where_nobody_waits(late_pool):
    with pytest.raises(RankError, match="written to while it was received: all_reduce"):
        late_pool.run(_never_waited_for, 2)


def _freed(rank, world_size):
    work = dist.all_reduce(torch.full((ELEMENTS,), float(rank)), async_op=True)
    gc.collect()
    work.wait()


def test_a_buffer_freed_in_flight_is_caught(late_pool, gloo_pool):
    gloo_pool.run(_freed, 2)
    with pytest.raises(RankError, match="freed while it was in flight: all_reduce"):
        late_pool.run(_freed, 2)


def _reused(rank, world_size):
    """A scratch buffer serves the next bucket before the first has been sent."""
    scratch, works = torch.empty(ELEMENTS), []
    outs = [torch.empty(world_size * ELEMENTS) for _ in range(2)]
    for out in outs:
        scratch.fill_(rank)
        works.append(dist.all_gather_single(out, scratch, async_op=True))
        scratch.add_(1)
    for work in works:
        work.wait()


def test_a_buffer_reused_in_flight_is_caught(late_pool):
    with pytest.raises(RankError, match="written to while it was sent"):
        late_pool.run(_reused, 2)


def _future_before_wait(rank, world_size):
    """A hook that completes DDP's Future with a buffer that is still under way."""
    ddp, works = make_ddp(), []

    def hook(state, bucket):
        buffer = bucket.buffer().div_(world_size)
        works.append(dist.all_reduce(buffer, async_op=True))
        if dist.get_backend() == "gloo":
            time.sleep(0.05)
        future = torch.futures.Future()
        future.set_result(buffer)
        return future

    ddp.register_comm_hook(None, hook)
    loss_of(ddp, rank, 0).backward()
    found = any(p.grad.isnan().any().item() for p in ddp.parameters())
    for work in works:
        work.wait()
    return found


def test_a_future_set_before_the_wait_carries_nothing(late_pool, gloo_pool):
    assert gloo_pool.run(_future_before_wait, 2) == [False, False]
    assert late_pool.run(_future_before_wait, 2) == [True, True]


def _other_order(rank, world_size):
    first, second = torch.ones(8), torch.ones(8)
    calls = [lambda: dist.all_reduce(first, async_op=True), lambda: dist.broadcast(second, 0, async_op=True)]
    for work in [call() for call in (calls if rank == 0 else calls[::-1])]:
        work.wait()


def test_another_order_is_caught(late_pool):
    text = r"ranks issue different collectives: rank 0: all_reduce\(8.*rank 1: broadcast\(8"
    with pytest.raises(RankError, match=text):
        late_pool.run(_other_order, 2)


def _other_order_of_groups(rank, world_size):
    """Gloo and this group bear it, as each group has a thread of its own; NCCL may wait for ever."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    tensors = [torch.ones(4), torch.ones(4)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()


def test_another_order_of_groups_is_caught(late_pool, gloo_pool):
    gloo_pool.run(_other_order_of_groups, 2)
    with pytest.raises(LateGroupError, match="groups are used in another order, at collective 0"):
        late_pool.run(_other_order_of_groups, 2)


def test_orders_are_compared_in_what_ranks_have_in_common():
    compare_orders([[("a", "x"), ("b", "y"), ("a", "x")], [("a", "x"), ("c", "z"), ("a", "x")]])


def _counted_as_another_backend(rank, world_size):
    comm = Communicator()
    out, chunks = torch.empty(4), torch.ones(world_size, 4)
    comm.reduce_scatter(out, chunks, mean=False).wait()
    return comm.backends.name, out.tolist(), dict(comm.traffic.calls)


def test_the_package_takes_the_way_of_other_backends(late_pool):
    assert late_pool.run(_counted_as_another_backend, 2) == [("late", [2.0] * 4, {"reduce_scatter": 1})] * 2


def _verify(rank, world_size):
    report = verify(None, "cpu")
    return report.to_dict(), report.text()


@pytest.mark.slow
def test_every_hook_is_verified_on_it(late_pool):
    for report, text in late_pool.run(_verify, 2, timeout=200):
        assert report["passed"], text
        assert {"allreduce", "powersgd", "post_localsgd", "zero_overlap"} <= set(report["hooks"])
        assert report["seconds"] < 120


# Where the ranks run.


def test_a_device_that_is_not_there_is_said_at_once(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is a device here")
    command = [sys.executable, "-m", "pytest", "tests/test_wire.py", "--device", "cuda", "--backend", "nccl"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    text = "--device cuda --backend nccl cannot run here: it needs at least 2 devices of type cuda"
    assert text in done.stdout + done.stderr


def test_more_ranks_than_devices_are_skipped(monkeypatch):
    monkeypatch.setattr(Setting, "devices", lambda self: 2)
    with pytest.raises(pytest.skip.Exception, match="3 ranks need as many devices, and there are 2"):
        RankPool(setting=Setting("nccl", "cuda")).run(_mean, 3)


def _backward_thread(rank, world_size):
    import threading

    threads = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: threads.append(threading.current_thread().name))
    tensor.sum().backward()
    return threads, threading.current_thread().name


def test_backward_runs_on_another_thread_if_asked():
    pool = RankPool(setting=Setting(backward_thread=True))
    try:
        ((threads, main),) = pool.run(_backward_thread, 1)
    finally:
        pool.stop()
    assert threads[0].startswith("backward") and main == "MainThread"

"""What every hook must keep, run over available_hooks(): a hook added later is tested on arrival."""

import copy
import gc
import io
import random
import time
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from models import Net, distance, loss_of, make_ddp, train, weights
from torch import nn
from torch.nn.modules import module as module_registry
from torch.utils._python_dispatch import TorchDispatchMode

from accel_commhooks import attach, available_hooks
from accel_commhooks.attachment.optimizers import step_watch
from accel_commhooks.hooks.host import as_on_accelerator
from accel_commhooks.upstream import patches

# Options with which a hook acts within a few steps; a new hook starts with its defaults.
OPTIONS = {
    "noop": {"i_know_that_replicas_diverge": True},
    "powersgd": {"start_powerSGD_iter": 1},
    "batched_powersgd": {"start_powerSGD_iter": 1},
    "post_localsgd": {"start_localSGD_iter": 1, "period": 3, "subgroup": "none"},
}
HOOKS = available_hooks()
STEPS = 8
CHECK_EVERY = 2  # all of this holds while ranks compare what they have in common


def _make(name, **ddp):
    model = make_ddp(Net(32), **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, attach(model, name, optimizer=optimizer, check_every=CHECK_EVERY, **OPTIONS.get(name, {}))


def _acts(rank, world_size, name):
    order = []
    real = {kind: getattr(dist, kind) for kind in ("all_reduce", "all_to_all_single", "broadcast")}

    def note(kind):
        def call(tensor, *args, **kwargs):
            order.append((kind, tuple(tensor.shape), str(tensor.dtype)))
            return real[kind](tensor, *args, **kwargs)

        return call

    ddp, optimizer, handle = _make(name)
    for kind in real:
        setattr(dist, kind, note(kind))
    try:
        train(ddp, rank, STEPS, optimizer=optimizer)
    finally:
        for kind, function in real.items():
            setattr(dist, kind, function)
    figures = handle.metrics()
    handle.synchronize()
    return weights(ddp), order, figures, handle.steps, dict(handle.comm.traffic.calls)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_acts_agrees_and_issues_in_one_order(pool, name, world_size):
    by_rank = pool.run(_acts, world_size, name)
    for final, order, figures, steps, calls in by_rank:
        assert steps == STEPS
        assert order == by_rank[0][1], "collectives were issued in another order"
        assert {"comm_plain_ddp_mb", "comm_mb_within_node", "comm_mb_between_nodes", "comm_wait_s"} <= figures.keys()
        if name == "noop":
            assert not order and figures["comm_mb_within_node"] == 0
        else:
            assert sum(calls.values()) > 0
            assert distance(final, by_rank[0][0]) == 0


class Deep(nn.Module):
    """Fifty layers: a bucket each where buckets are small."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(50))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + 0.1 * torch.tanh(layer(hidden))
        return hidden


def _buckets(rank, world_size, name, bucket_cap_mb):
    """Ranks out of step: each sleeps at random before its backward, and between its buckets."""
    ddp = make_ddp(Deep(), bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    options = dict(OPTIONS.get(name, {}))
    if name == "post_localsgd":
        options["start_localSGD_iter"] = 4  # DDP has one bucket at the first step, and none at local ones
    handle = attach(ddp, name, optimizer=optimizer, **options)
    naps, real, counts = random.Random(rank), handle.hook.reduce, []

    def reduce(bucket):
        counts[-1] += 1
        time.sleep(naps.choice([0, 0, 0, 0.002]))
        return real(bucket)

    handle.hook.reduce = reduce
    for step in range(STEPS):
        counts.append(0)
        loss = ddp(torch.randn(4, 24, generator=torch.Generator().manual_seed(1000 * step + rank))).square().mean()
        time.sleep(naps.choice([0, 0.02]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.synchronize()
    return weights(ddp), max(counts)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "noop"])
def test_one_bucket_or_fifty_with_ranks_out_of_step(pool, name, world_size):
    many, one = (pool.run(_buckets, world_size, name, cap) for cap in (0.002, 100))
    assert many[0][1] >= 50 and one[0][1] == 1
    for final, _ in (*many, *one):
        assert all(torch.isfinite(weight).all() for weight in final.values())
    for by_rank in (many, one):
        assert all(distance(final, by_rank[0][0]) == 0 for final, _ in by_rank)
    if world_size == 2:
        # A sum of two has one order, so buckets may not matter at all; only products may be rounded in other blocks.
        assert distance(many[0][0], one[0][0]) <= 1e-6


def _round_trip(rank, world_size, name):
    """State by parameter name, through a file that torch.load accepts at its defaults, into a model with other buckets."""
    ddp, optimizer, handle = _make(name)
    train(ddp, rank, 4, optimizer=optimizer)
    handle.open_consensus()
    handle.prepare_save()
    stream = io.BytesIO()
    torch.save({"hook": handle.state_dict()}, stream)
    whole = copy.deepcopy(optimizer.state_dict()["state"])
    model_state = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    shared = [
        {"optimizer": {"state": whole, "param_groups": optimizer.state_dict()["param_groups"]}, "model": model_state}
    ]
    dist.broadcast_object_list(shared, 0)
    train(ddp, rank, 4, optimizer=optimizer, first=4)
    handle.synchronize()
    stream.seek(0)
    other, other_optimizer, other_handle = _make(name, bucket_cap_mb=100)
    if name == "noop":
        shared[0]["model"], shared[0]["optimizer"]["state"] = model_state, whole  # every rank trains a model of its own
    other.module.load_state_dict(shared[0]["model"])
    other_optimizer.load_state_dict(shared[0]["optimizer"])
    other_handle.load_state_dict(torch.load(stream, weights_only=True)["hook"])
    train(other, rank, 4, optimizer=other_optimizer, first=4)
    other_handle.synchronize()
    names = {n for n, _ in ddp.module.named_parameters()}
    return distance(weights(ddp), weights(other)), other_handle.steps, _keys(handle.state_dict()), names


def _keys(state, found=None):
    found = set() if found is None else found
    for key, value in state.items():
        if torch.is_tensor(value):
            found.add(key)
        elif isinstance(value, dict):
            _keys(value, found)
    return found


@pytest.mark.parametrize("name", HOOKS)
def test_state_round_trips_by_parameter_name(pool, name):
    for off, steps, keys, names in pool.run(_round_trip, 2, name):
        assert steps == 8
        assert off <= 1e-6
        allowed = names | {"exp_avg", "exp_avg_sq", "step", "(all parameters)"}
        assert keys <= allowed, keys - allowed


def _hooks_set(ddp, optimizer):
    modules = [ddp, *ddp.module.modules()]
    return {
        "forward": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
        "state": sum(len(m._state_dict_hooks) + len(m._state_dict_pre_hooks) for m in modules),
        "optimizer": sum(
            len(getattr(optimizer, kind))
            for kind in (
                "_optimizer_step_pre_hooks",
                "_optimizer_step_post_hooks",
                "_optimizer_state_dict_post_hooks",
                "_optimizer_load_state_dict_post_hooks",
            )
        ),
        "listeners": [len(watch().listeners) for watch in (step_watch, patches.grad_scaler_watch, patches.load_watch)],
        "global module": len(module_registry._global_module_registration_hooks),
        "tensor": sum(len(p._backward_hooks or ()) for p in ddp.parameters()),
        "own attributes": "zero_grad" in vars(ddp),
        "parameters": all(type(m._parameters) is dict for m in modules),
    }


def _detach(rank, world_size, name):
    ddp = make_ddp(Net(32))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    loss_of(ddp, rank, 0)  # the first forward without a hook is watched for (agreement.py), and no other
    before = _hooks_set(ddp, optimizer)
    handle = attach(ddp, name, optimizer=optimizer, **OPTIONS.get(name, {}))
    train(ddp, rank, 4, optimizer=optimizer)
    during = _hooks_set(ddp, optimizer)
    handle.detach()
    handle.detach()  # twice does no harm
    after = _hooks_set(ddp, optimizer)
    # Plain DDP from here on, and another hook may be attached.
    dist.barrier()
    if name == "noop":
        for p in ddp.parameters():
            dist.broadcast(p.data, 0)
        optimizer.state.clear()
    train(ddp, rank, 2, optimizer=optimizer, first=4)
    second = attach(ddp, "allreduce", optimizer=optimizer)
    train(ddp, rank, 2, optimizer=optimizer, first=6)
    return before, during, after, second.steps


@pytest.mark.parametrize("name", HOOKS)
def test_detach_is_clean(pool, name):
    for before, during, after, steps in pool.run(_detach, 2, name):
        assert during != before
        assert after == before
        assert steps == 2


def _forgotten(rank, world_size, name):
    """A model that nobody holds any more goes, with everything of ours, although nobody called detach()."""
    before = len(step_watch().listeners)
    ddp, optimizer, handle = _make(name)
    train(ddp, rank, 3, optimizer=optimizer)
    handle.synchronize()
    gone = [weakref.ref(ddp), weakref.ref(handle), weakref.ref(handle.hook)]
    del ddp, optimizer, handle
    gc.collect()
    return [reference() is None for reference in gone], len(step_watch().listeners) - before


@pytest.mark.parametrize("name", HOOKS)
def test_nothing_keeps_a_forgotten_model_alive(pool, name):
    assert pool.run(_forgotten, 2, name) == [([True] * 3, 0)] * 2


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "_local_scalar_dense" in name or "nonzero" in name or "is_nonzero" in name:
            self.seen[name] += 1
        if "_to_copy" in name and (kwargs or {}).get("device") == torch.device("cpu"):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def _host_reads(rank, world_size, name):
    with as_on_accelerator():
        return _count_host_reads(rank, name)


def _count_host_reads(rank, name):
    ddp, optimizer, _ = _make(name, find_unused_parameters=True)
    train(ddp, rank, 5, optimizer=optimizer)
    watch = HostReads()
    plain = make_ddp(Net(32), find_unused_parameters=True)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, rank, 5, optimizer=plain_optimizer)
    baseline = HostReads()
    with baseline:
        _four_steps(plain, plain_optimizer, rank)
    with watch:
        _four_steps(ddp, optimizer, rank)
    return dict(watch.seen - baseline.seen)


def _four_steps(ddp, optimizer, rank):
    for step in range(5, 9):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", HOOKS)
def test_no_host_synchronisation_in_a_step(pool, name):
    assert pool.run(_host_reads, 2, name) == [{}, {}]


def test_the_count_of_host_reads_can_fail():
    with HostReads() as watch:
        torch.ones(1).item()
        torch.ones(2).nonzero()
    assert sum(watch.seen.values()) >= 2


class Devices(TorchDispatchMode):
    """Notes factory calls that do not say on which device to make a tensor."""

    FACTORIES = (
        "aten.empty",
        "aten.zeros",
        "aten.ones",
        "aten.full",
        "aten.randn",
        "aten.arange",
        "aten.scalar_tensor",
    )

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        bare = name.startswith(self.FACTORIES) and "_like" not in name
        if bare and (kwargs or {}).get("device") is None:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def _bare_factories(rank, world_size, name):
    ddp, optimizer, _ = _make(name, find_unused_parameters=True)
    plain = make_ddp(Net(32), find_unused_parameters=True)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for model, its_optimizer in ((ddp, optimizer), (plain, plain_optimizer)):
        train(model, rank, 5, optimizer=its_optimizer)
    watch, baseline = Devices(), Devices()
    with baseline:
        _four_steps(plain, plain_optimizer, rank)
    with watch:
        _four_steps(ddp, optimizer, rank)
    return dict(watch.seen - baseline.seen)


@pytest.mark.parametrize("name", HOOKS)
def test_tensors_take_their_device_from_their_input(pool, name):
    assert pool.run(_bare_factories, 2, name) == [{}, {}]

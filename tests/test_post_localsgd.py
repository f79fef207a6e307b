"""Post-local SGD against torch's hook and averagers, plain DDP, and a short DiLoCo written here."""

import copy
import random
import time
import warnings
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from models import Net, distance, loss_of, make_ddp, train, two_groups, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

from accel_commhooks import attach
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.hooks.local_sgd import averaging
from accel_commhooks.hooks.local_sgd.averaging import BUCKET_BYTES, average_in_place, slices


def _ours(rank, world_size, steps, options, optimizer_name="adamw", **ddp_options):
    ddp = make_ddp(**ddp_options)
    optimizer = _optimizer(ddp, optimizer_name)
    handle = attach(ddp, "post_localsgd", optimizer=optimizer, **options)
    train(ddp, rank, steps, optimizer=optimizer)
    return weights(ddp), handle


def _optimizer(ddp, name):
    if name == "sgd":
        return torch.optim.SGD(ddp.parameters(), lr=0.1)
    return torch.optim.AdamW(two_groups(ddp.module), lr=0.01)


# Equality with torch.


def _torchs_loop(rank, world_size, steps, start, averager):
    ddp = make_ddp()
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = stock.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=start)
    ddp.register_comm_hook(state, stock.post_localSGD_hook)
    optimizer = _optimizer(ddp, "adamw")
    for step in range(steps):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        averager.average_parameters(ddp.parameters())
        optimizer.zero_grad()
    return weights(ddp)


def _periodic(rank, world_size):
    theirs = _torchs_loop(rank, world_size, 40, 10, averagers.PeriodicModelAverager(period=4, warmup_steps=10))
    ours, handle = _ours(rank, world_size, 40, {"start_localSGD_iter": 10, "period": 4, "subgroup": "none"})
    return theirs, ours, handle.metrics()


def test_same_weights_as_torchs_hook_and_averager(pool):
    by_rank = pool.run(_periodic, 2)
    assert distance(by_rank[0][1], by_rank[1][1]) > 1e-5, "local steps did not happen"
    for theirs, ours, _ in by_rank:
        assert distance(theirs, ours) <= 1e-6


def _hierarchical(rank, world_size):
    averager = HierarchicalModelAverager(period_group_size_dict={2: 2, 6: 4}, warmup_steps=4)
    theirs = _torchs_loop(rank, world_size, 40, 4, averager)
    options = {"start_localSGD_iter": 4, "period_group_size": {2: 2, 6: 4}, "subgroup": "none"}
    ours, _ = _ours(rank, world_size, 40, options)
    return theirs, ours


def test_same_weights_as_torchs_hierarchical_averager(pool):
    by_rank = pool.run(_hierarchical, 4)
    assert distance(by_rank[0][1], by_rank[2][1]) > 1e-5, "the two halves did not train apart"
    for theirs, ours in by_rank:
        assert distance(theirs, ours) <= 1e-6


def _handed_in(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = []
        for make in (
            lambda: averagers.PeriodicModelAverager(period=3, warmup_steps=2),
            lambda: HierarchicalModelAverager(period_group_size_dict={3: world_size}),
        ):
            options = {"start_localSGD_iter": 2, "subgroup": "none"}
            given, _ = _ours(rank, world_size, 12, {**options, "averager": make()})
            results.append(given)
        ours, _ = _ours(rank, world_size, 12, {"start_localSGD_iter": 2, "subgroup": "none", "period": 3})
    return results, ours


def test_torchs_own_averagers_can_be_handed_in(pool):
    (periodic, _), ours = pool.run(_handed_in, 2)[0]
    assert distance(periodic, ours) <= 1e-6


def _period_one(rank, world_size):
    ddp = make_ddp()
    train(ddp, rank, 20, optimizer=_optimizer(ddp, "sgd"))
    options = {"start_localSGD_iter": 0, "period": 1, "subgroup": "none"}
    ours, handle = _ours(rank, world_size, 20, options, "sgd")
    return weights(ddp), ours, handle.comm.traffic.calls


def test_period_one_with_sgd_is_plain_ddp(pool):
    for plain, ours, calls in pool.run(_period_one, 3):
        assert calls["all_reduce"] >= 20
        # The mean of w - lr g is w - lr mean(g), so only rounding differs.
        assert distance(plain, ours) <= 1e-6


# The outer optimizer.


def _diloco(rank, world_size, outer, options):
    """DiLoCo in a few lines, beside ours."""
    model = make_ddp().module
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    anchor = [p.detach().clone() for p in model.parameters()]
    sgd = torch.optim.SGD(
        anchor,
        lr=outer["lr"],
        momentum=outer["momentum"],
        nesterov=outer["name"] == "nesterov" and outer["momentum"] > 0,
    )
    for step in range(20):
        loss_of(model, rank, step).backward()
        inner.step()
        inner.zero_grad()
        if step % 4 == 0:
            for a, p in zip(anchor, model.parameters(), strict=True):
                a.grad = a.detach() - p.detach()
                dist.all_reduce(a.grad)
                a.grad /= world_size
            sgd.step()
            with torch.no_grad():
                for a, p in zip(anchor, model.parameters(), strict=True):
                    p.copy_(a)
    reference = weights(model)
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    attach(ddp, "post_localsgd", start_localSGD_iter=0, period=4, subgroup="none", outer=outer, **options)
    train(ddp, rank, 20, optimizer=optimizer)
    return reference, weights(ddp)


@pytest.mark.parametrize(
    "outer",
    [
        {"name": "nesterov", "lr": 0.7, "momentum": 0.9},
        {"name": "sgd", "lr": 0.7, "momentum": 0.9},
        {"name": "sgd", "lr": 1.0, "momentum": 0.0},
    ],
    ids=str,
)
def test_outer_step_is_dilocos(pool, outer):
    for reference, ours in pool.run(_diloco, 2, outer, {}):
        assert distance(reference, ours) <= 2e-6  # changes are differences of weights of size one: two roundings more


def test_outer_sgd_with_rate_one_is_plain_averaging(pool):
    options = {"start_localSGD_iter": 2, "period": 4, "subgroup": "none"}
    plain = pool.run(_weights_only, 2, 20, options)
    outer = pool.run(_weights_only, 2, 20, {**options, "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}})
    # Adam divides by the root of a running square, which enlarges a rounding where gradients are small.
    assert distance(plain[0], outer[0]) <= 1e-5


def _weights_only(rank, world_size, steps, options):
    return _ours(rank, world_size, steps, options)[0]


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_narrow_wire_keeps_replicas_equal_and_near(pool, wire_dtype):
    options = {"start_localSGD_iter": 2, "period": 4, "subgroup": "none"}
    plain = pool.run(_weights_only, 2, 19, options)
    narrow = pool.run(_weights_only, 2, 19, {**options, "wire_dtype": wire_dtype})
    assert distance(narrow[0], narrow[1]) == 0
    moved = distance(plain[0], weights(_start()))
    assert 0 < distance(plain[0], narrow[0]) < 0.1 * moved


def _start():
    torch.manual_seed(0)
    return Net()


# Overlap.


def _overlapped(rank, world_size, overlap):
    """The definition, written out: what was sent comes back k steps later as a correction."""
    model = make_ddp().module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = mean = None
    for step in range(15):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if sent is not None and step % 5 == overlap:
                for p, s, m in zip(model.parameters(), sent, mean, strict=True):
                    p += m - s
            if step % 5 == 0:
                sent = [p.clone() for p in model.parameters()]
                mean = [p.clone() for p in model.parameters()]
                for m in mean:
                    dist.all_reduce(m)
                    m /= world_size
                if overlap == 0:
                    for p, m in zip(model.parameters(), mean, strict=True):
                        p.copy_(m)
    options = {"start_localSGD_iter": 0, "period": 5, "subgroup": "none", "overlap_steps": overlap}
    ours, _ = _ours(rank, world_size, 15, options, "sgd")
    return weights(model), ours


@pytest.mark.parametrize("overlap", [0, 1, 4])
def test_overlap_is_a_late_correction(pool, overlap):
    for reference, ours in pool.run(_overlapped, 2, overlap):
        assert distance(reference, ours) <= 2e-6


def _sent_in_parts(rank, world_size):
    """How many slices are sent after each step, and in which group."""
    sent, groups = Counter(), set()
    real = Communicator.all_reduce
    ddp = make_ddp(Net(64))
    options = {"start_localSGD_iter": 0, "period": 8, "subgroup": "none", "overlap_steps": 4, "check_every": 0}
    handle = attach(ddp, "post_localsgd", **options)

    def all_reduce(comm, tensor, **kwargs):
        sent[handle.steps] += 1
        groups.add(kwargs["group"].process_group is dist.group.WORLD)
        return real(comm, tensor, **kwargs)

    with (
        patch.object(Communicator, "all_reduce", all_reduce),
        patch.dict(averaging.Exchange.__init__.__kwdefaults__, bucket_bytes=4 * 4096),
    ):
        train(ddp, rank, 8)
    return dict(sent), groups


def test_an_overlapped_averaging_is_sent_in_parts_and_apart(pool):
    """A backend's timeout counts from when a collective is issued, and a script's own ones must not queue behind it."""
    for sent, groups in pool.run(_sent_in_parts, 2):
        assert sorted(sent) == [1, 2, 3, 4] and max(sent.values()) <= min(sent.values()) + 1
        assert sum(sent.values()) >= 8
        assert groups == {False}, "not in the script's group"


# Silence between averagings.


def _quiet(rank, world_size, buffers, find_unused):
    ddp = make_ddp(Net(buffers=buffers), find_unused_parameters=find_unused)
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=2, period=5, subgroup="none", ranks_per_node=1)
    sent = []
    train(ddp, rank, 12, on_step=lambda step: sent.append(handle.comm.traffic.scope("between")))
    return [b - a for a, b in zip([0, *sent[:-1]], sent, strict=True)]


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_nothing_crosses_between_averagings(pool, buffers, find_unused):
    for per_step in pool.run(_quiet, 2, buffers, find_unused):
        quiet = [s for s in range(2, 12) if (s - 2) % 5]
        assert all(per_step[s] == 0 for s in quiet)
        assert all(per_step[s] > 0 for s in (0, 1, 2, 7))


def _quiet_on_the_wire(rank, world_size, buffers):
    """No collective at all reaches the backend at a local step, DDP's own included: counted by the group itself."""
    ddp = make_ddp(Net(buffers=buffers), find_unused_parameters=True)
    attach(ddp, "post_localsgd", start_localSGD_iter=1, period=4, subgroup="none", ranks_per_node=1)
    group = dist.group.WORLD
    numbers = []
    train(ddp, rank, 10, on_step=lambda step: numbers.append(group._get_sequence_number_for_group()))
    return [b - a for a, b in zip([0, *numbers[:-1]], numbers, strict=True)]


@pytest.mark.parametrize("buffers", [False, True])
def test_no_collective_of_ddp_either(pool, buffers):
    for issued in pool.run(_quiet_on_the_wire, 2, buffers):
        assert [issued[s] for s in (2, 3, 4, 6, 7, 8)] == [0] * 6
        assert issued[0] > 0 and issued[1] > 0 and issued[5] > 0


# Gradients inside the node.


def _node_gradients(rank, world_size, find_unused, accumulation):
    ddp = make_ddp(find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach(ddp, "post_localsgd", start_localSGD_iter=0, period=100, warmup_steps=50, ranks_per_node=2)
    train(ddp, rank, 6, optimizer=optimizer, accumulation=accumulation, clip=0.5)
    mine = weights(ddp)
    # The same in plain DDP on the node's two ranks alone.
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = make_ddp(process_group=nodes[rank // 2])
    train(plain, rank, 6, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1), accumulation=accumulation, clip=0.5)
    return mine, weights(plain)


@pytest.mark.parametrize(("find_unused", "accumulation"), [(False, 1), (True, 1), (True, 2)])
def test_a_node_is_plain_ddp_of_its_own(pool, find_unused, accumulation):
    by_rank = pool.run(_node_gradients, 4, find_unused, accumulation)
    assert distance(by_rank[0][0], by_rank[2][0]) > 1e-4
    for mine, plain in by_rank:
        assert distance(mine, plain) <= 1e-6


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))
        self.use_sometimes = True

    def forward(self, x):
        x = self.always(x)
        return self.sometimes(x) if self.use_sometimes else x


def _unused_in_node(rank, world_size):
    ddp = make_ddp(Optional(), find_unused_parameters=True)
    ddp.module.use_sometimes = rank == 0
    attach(ddp, "post_localsgd", start_localSGD_iter=0, ranks_per_node=2)
    ddp(torch.ones(2, 4)).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in ddp.module.named_parameters()}


def test_what_nobody_used_keeps_no_gradient(pool):
    first, second = pool.run(_unused_in_node, 2)
    assert first["never.weight"] is None and second["never.weight"] is None
    assert torch.equal(first["sometimes.weight"], second["sometimes.weight"])


# A skipped step.


def _skipped(rank, world_size, set_to_none):
    ddp = make_ddp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=0, period=3, subgroup="none", grad_scaler=scaler)
    for step in range(9):
        loss = loss_of(ddp, rank, step)
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
    handle.synchronize()
    return weights(ddp), handle.steps, scaler.get_scale()


def test_a_step_that_one_rank_skips_counts_on_all(pool):
    first, second = pool.run(_skipped, 2, True)
    assert first[2] == 2 * second[2], "rank 1 alone must have skipped a step"
    # The last step's end is seen at the next forward on a rank that skips; here it did not skip.
    assert first[1] == second[1] == 9
    assert distance(first[0], second[0]) == 0


# Consensus.


def _evaluated(rank, world_size, evaluate_at, restore, overlap):
    ddp = make_ddp(Net(buffers=True))
    options = {"start_localSGD_iter": 1, "period": 6, "subgroup": "none", "restore_local": restore}
    handle = attach(ddp, "post_localsgd", overlap_steps=overlap, **options)
    seen = {}

    def look(step):
        if step in evaluate_at:
            local = weights(ddp)
            with handle.consensus():
                shown = weights(ddp)
                mean = {}
                for name, value in local.items():
                    mean[name] = value.clone()
                    dist.all_reduce(mean[name])
                    mean[name] /= world_size
                with torch.no_grad():
                    ddp.module.eval()
                    metric = loss_of(ddp.module, 0, 1000).item()
                    ddp.module.train()
            seen[step] = (distance(shown, mean), distance(local, shown), metric)

    train(ddp, rank, 14, on_step=look)
    return seen, weights(ddp)


@pytest.mark.parametrize("overlap", [0, 3])
def test_the_consensus_is_the_mean_and_local_weights_come_back(pool, overlap):
    looked = pool.run(_evaluated, 2, [4, 9], True, overlap)
    unseen = pool.run(_evaluated, 2, [], True, overlap)
    for rank in range(2):
        seen, final = looked[rank]
        for step in (4, 9):
            off, moved, metric = seen[step]
            assert moved > 1e-5, "replicas were equal already"
            assert off <= 1e-6
            assert metric == looked[0][0][step][2]
        assert distance(final, unseen[rank][1]) == 0


def test_without_restore_the_consensus_stays(pool):
    looked = pool.run(_evaluated, 2, [4], False, 0)
    assert looked[0][0][4][2] == looked[1][0][4][2]


# Storage and memory.


def _storages(rank, world_size, options):
    ddp = make_ddp()
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=0, period=2, subgroup="none", **options)
    before = {n: (p.data_ptr(), p.untyped_storage().data_ptr()) for n, p in ddp.module.named_parameters()}
    tied = ddp.module.head.weight is ddp.module.embed.weight
    train(ddp, rank, 5)
    handle.synchronize()
    after = {n: (p.data_ptr(), p.untyped_storage().data_ptr()) for n, p in ddp.module.named_parameters()}
    return before == after, tied and ddp.module.head.weight is ddp.module.embed.weight


@pytest.mark.parametrize("options", [{}, {"outer": {"lr": 0.7}}, {"overlap_steps": 1}], ids=str)
def test_storages_and_ties_are_untouched(pool, options):
    assert pool.run(_storages, 2, options) == [(True, True), (True, True)]


def _mixed(rank, world_size):
    comm = Communicator()
    tensors = [torch.randn(3000), torch.randn(10), torch.randn(100, 70), torch.randn(64).to(torch.bfloat16)]
    tensors.append(torch.randn(40, 30).t())
    expected = [t.clone().float() for t in tensors]
    for e in expected:
        dist.all_reduce(e)
        e /= world_size
    average_in_place(comm, tensors, bucket_bytes=1000)
    return [float((t.float() - e).abs().max()) for t, e in zip(tensors, expected, strict=True)]


def test_means_of_all_kinds_of_tensors(pool):
    for errors in pool.run(_mixed, 3):
        assert max(errors[:3]) <= 1e-6 and errors[4] <= 1e-6
        assert errors[3] <= 3 * 2**-8  # values up to three, sums of bf16


def _peak(rank, world_size, ours):
    """How far the process's memory rose above where it stood, while 160 MB of parameters were averaged."""
    parameters = [nn.Parameter(torch.ones(10_000_000)) for _ in range(4)]
    for p in parameters:
        p.grad = torch.zeros_like(p)  # torch's averager skips a parameter without one
    comm = Communicator()
    average_in_place(comm, [torch.ones(1000)])  # connections and their buffers

    def memory(field):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = memory("VmRSS")
    if ours:
        average_in_place(comm, parameters, bucket_bytes=16 * 2**20)
    else:
        averagers.PeriodicModelAverager(period=1).average_parameters(parameters)
    return memory("VmHWM") - before


@pytest.mark.only_backend(
    "gloo", "the memory of the process is measured, and the late group keeps copies of all it sends"
)
def test_extra_memory_is_bounded_by_the_bucket(own_pool):
    bucket = 16 * 2**20
    assert max(own_pool.run(_peak, 2, True)) <= bucket  # what the backend receives into included
    assert min(own_pool.run(_peak, 2, False)) >= 150_000_000, "torch's averager no longer copies the model"


def test_slices_cover_everything_once():
    tensors = [torch.empty(7), torch.empty(0), torch.empty(100, dtype=torch.float64), torch.empty(3, 5)]
    seen = [torch.zeros(t.numel(), dtype=torch.int) for t in tensors]
    for pieces in slices(tensors, 64):
        assert sum(p.length * tensors[p.index].element_size() for p in pieces) <= 64
        for piece in pieces:
            seen[piece.index][piece.start : piece.start + piece.length] += 1
    assert all((s == 1).all() for s in seen)
    assert BUCKET_BYTES == 25 * 2**20


# Buffers and moments.


def _buffers(rank, world_size, choice):
    ddp = make_ddp(Net(buffers=True))
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=0, period=4, subgroup="none", buffers=choice)
    local = []
    original = handle.hook.replicas._average_buffers

    def note(group):
        local.append(ddp.module.norm.running_mean.clone())
        original(group)

    handle.hook.replicas._average_buffers = note
    train(ddp, rank, 5)
    return local[-1], ddp.module.norm.running_mean.clone()


@pytest.mark.parametrize("choice", ["average", "keep", "broadcast"])
def test_buffers_by_choice(pool, choice):
    (a_local, a), (b_local, b) = pool.run(_buffers, 2, choice)
    assert not torch.allclose(a_local, b_local, atol=1e-4)
    expected = {"average": [(a_local + b_local) / 2] * 2, "keep": [a_local, b_local], "broadcast": [a_local] * 2}
    assert torch.allclose(a, expected[choice][0], atol=1e-6) and torch.allclose(b, expected[choice][1], atol=1e-6)


def _moments(rank, world_size, choice):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    attach(
        ddp,
        "post_localsgd",
        optimizer=optimizer,
        start_localSGD_iter=0,
        period=4,
        subgroup="none",
        optimizer_state=choice,
    )
    train(ddp, rank, 5, optimizer=optimizer)
    state = optimizer.state.get(ddp.module.embed.weight)
    return None if not state else state["exp_avg"].clone()


def test_inner_moments_by_choice(pool):
    keep = pool.run(_moments, 2, "keep")
    assert not torch.allclose(*keep, atol=1e-7)
    average = pool.run(_moments, 2, "average")
    assert torch.equal(*average)
    assert pool.run(_moments, 2, "reset") == [None, None]


# Out of step.


def _sleepy(rank, world_size, options):
    ddp = make_ddp()
    handle = attach(ddp, "post_localsgd", start_localSGD_iter=3, period=3, **options)
    chance = random.Random(rank)

    def nap(step):
        time.sleep(chance.random() * 0.02)

    train(ddp, rank, 40, on_step=nap)
    handle.synchronize()
    return weights(ddp)


@pytest.mark.parametrize(
    "options", [{"subgroup": "none"}, {"ranks_per_node": 1, "overlap_steps": 2, "outer": {"lr": 0.7}}], ids=str
)
def test_ranks_out_of_step_agree(pool, options):
    by_rank = pool.run(_sleepy, 3, options)
    assert all(distance(final, by_rank[0]) == 0 for final in by_rank)


# Resuming.


def _resume(rank, world_size, options, cut, drop):
    """One run of twelve steps, and one that is cut, saved, and continued in new objects."""

    def run(first, steps, state=None):
        ddp = make_ddp(Net(buffers=True))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        handle = attach(ddp, "post_localsgd", optimizer=optimizer, start_localSGD_iter=2, period=4, **options)
        if state is not None:
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if not drop:
                handle.load_state_dict(state["hook"])
            handle.hook.step = first
        train(ddp, rank, steps, optimizer=optimizer, first=first)
        return ddp, optimizer, handle

    def save(ddp, optimizer, handle):
        handle.open_consensus()
        everything = [
            {"model": copy.deepcopy(ddp.module.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
        ]
        dist.broadcast_object_list(everything, 0)  # rank 0 writes these for all
        return {**everything[0], "hook": handle.state_dict()}

    ddp, optimizer, handle = run(0, cut)
    state = save(ddp, optimizer, handle)
    train(ddp, rank, 12 - cut, optimizer=optimizer, first=cut)
    resumed = run(cut, 12 - cut, state)[0]
    return weights(ddp), weights(resumed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"restore_local": True},
        {"outer": {"lr": 0.7}, "wire_dtype": "bf16"},
        {"overlap_steps": 3, "restore_local": True, "outer": {"lr": 0.7}},
        {"optimizer_state": "average"},
    ],
    ids=str,
)
def test_resumed_is_uninterrupted(pool, options):
    options = {"subgroup": "none", **options}
    for uninterrupted, resumed in pool.run(_resume, 2, options, 8, False):
        assert distance(uninterrupted, resumed) <= 1e-6


def test_without_the_hooks_state_it_is_another_run(pool):
    options = {"subgroup": "none", "outer": {"lr": 0.7}}
    assert all(distance(*pair) > 1e-4 for pair in pool.run(_resume, 2, options, 8, True))

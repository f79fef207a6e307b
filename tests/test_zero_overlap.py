"""ZeRO overlap against plain DDP with the same optimizer, and what torch's own hook gets wrong."""

import copy
import ctypes
import gc
import io
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Net, distance, loss_of, make_ddp, train, two_groups, weights
from torch import nn

from accel_commhooks import CompatibilityError, attach
from accel_commhooks.attachment import optimizers as model_optimizers

# Attention's key bias has no gradient but rounding; Adam would make full steps of it.
EPSILON = 1e-3
OPTIMIZERS = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True),
    "adamw_single": lambda g: torch.optim.AdamW(g, lr=0.001, foreach=False),
    "adamw_foreach": lambda g: torch.optim.AdamW(g, lr=0.01, foreach=True),
    "adamw_fused": lambda g: torch.optim.AdamW(g, lr=0.01, fused=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.01),
    "adadelta": lambda g: torch.optim.Adadelta(g, lr=0.5),
    "adamax": lambda g: torch.optim.Adamax(g, lr=0.01),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.05),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "radam": lambda g: torch.optim.RAdam(g, lr=0.01),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.005, momentum=0.5, centered=True),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.005),
}


def _both(rank, world_size, optimizer_name, options, training, ddp_options, steps=30, dtype=torch.float32):
    """Weights and reported norms of plain DDP and of ours, and our figures."""
    runs = []
    figures = {}
    for hooked in (False, True):
        torch.manual_seed(0)
        ddp = make_ddp(Net().to(dtype), **ddp_options)
        optimizer = OPTIMIZERS[optimizer_name](two_groups(ddp.module))
        handle = attach(ddp, "zero_overlap", optimizer=optimizer, **options) if hooked else None
        norms = []
        real = nn.utils.clip_grad_norm_

        def clip(*args, real=real, norms=norms, **kwargs):
            norms.append(float(real(*args, **kwargs)))

        nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip
        try:
            train(ddp, rank, steps, optimizer=optimizer, **training)
        finally:
            nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = real
        if handle is not None:
            figures = handle.metrics()
        runs.append((weights(ddp), norms))
    (plain, plain_norms), (ours, our_norms) = runs
    norm_error = max((abs(a - b) / max(1.0, a) for a, b in zip(plain_norms, our_norms, strict=True)), default=0.0)
    return distance(plain, ours), norm_error, ours, figures


def _check(by_rank, tolerance=1e-6):
    for off, norm_error, ours, figures in by_rank:
        assert figures["comm_optimizer_state_mb"] > 0
        assert off <= tolerance
        assert norm_error <= tolerance
        assert distance(ours, by_rank[0][2]) == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("clip", [0.05, 1.0])
def test_trains_as_ddp_with_groups_schedule_clipping_and_accumulation(pool, world_size, clip):
    training = {"clip": clip, "schedule": True, "accumulation": 2}
    _check(pool.run(_both, world_size, "adamw_single", {}, training, {}))


@pytest.mark.parametrize("clip", [0.05, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_of_torch(pool, name, clip):
    # Optimizers that divide by small numbers magnify rounding, RMSprop a thousandfold; from double precision's 1e-16 that
    # leaves room for a narrow tolerance. Rprop acts on signs: no gradient of this model is zero but for rounding.
    training = {"clip": clip, "schedule": True, "accumulation": 2}
    _check(pool.run(_both, 2, name, {}, training, {}, 30, torch.float64), tolerance=1e-9)


@pytest.mark.parametrize("step", ["backward", "interleaved"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_inside_backward(pool, step, world_size):
    _check(pool.run(_both, world_size, "adamw_foreach", {"step": step}, {"schedule": True, "accumulation": 2}, {}))


def test_whole_parameters_to_single_ranks(pool):
    _check(pool.run(_both, 3, "adamw_single", {"shard_buckets": False}, {"clip": 0.05}, {}))


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb": 0.0005},
    ],
    ids=str,
)
def test_ddp_options(pool, ddp_options):
    _check(pool.run(_both, 2, "adamw_single", {}, {"clip": 0.5}, ddp_options, 10))


@pytest.mark.parametrize(("wire_dtype", "share"), [("bf16", 0.52), ("int8", 0.47)])  # slices are padded to 128
def test_narrow_wire_sends_less_and_replicas_stay_equal(pool, wire_dtype, share):
    by_rank = pool.run(_both, 2, "adamw_single", {"wire_dtype": wire_dtype}, {}, {})
    for off, _, ours, figures in by_rank:
        assert figures["comm_compression"] >= 1 / share
        assert 0 < off < 0.05
        assert distance(ours, by_rank[0][2]) == 0


# Odd models.


class Odd(nn.Module):
    """Sizes that divide nothing, a scalar, a child's weight used without calling the child, frozen and unused parts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 7)
        self.attention = nn.MultiheadAttention(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(7, 3)
        self.head = nn.Linear(7, 20)

    def forward(self, tokens):
        hidden = self.embed(tokens).unsqueeze(1)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.frozen(hidden.squeeze(1)) * self.scale + self.one)


def _odd(rank, world_size, dtype):
    runs = []
    for hooked in (False, True):
        ddp = make_ddp(Odd().to(dtype), find_unused_parameters=True)
        optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.01, eps=EPSILON)
        if hooked:
            attach(ddp, "zero_overlap")
        train(ddp, rank, 12, optimizer=optimizer, clip=0.3)
        runs.append(weights(ddp))
    return distance(*runs), float((runs[1]["scale"] - 1.5).abs()), runs[1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_odd_sizes_scalars_frozen_and_unused(pool, world_size):
    by_rank = pool.run(_odd, world_size, torch.float32)
    for off, moved, ours in by_rank:
        assert moved > 1e-5
        assert off <= 1e-6
        assert distance(ours, by_rank[0][2]) == 0


class Mixed(Odd):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(20, 20).double()

    def forward(self, tokens):
        return self.extra(super().forward(tokens).double())


def _mixed(rank, world_size):
    runs = []
    for hooked in (False, True):
        ddp = make_ddp(Mixed(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.01, eps=EPSILON)
        if hooked:
            attach(ddp, "zero_overlap")
        train(ddp, rank, 8, optimizer=optimizer)
        runs.append(weights(ddp))
    return distance(*runs)


def test_mixed_dtypes(pool):
    assert max(pool.run(_mixed, 3)) <= 1e-6


def _later_group(rank, world_size):
    runs = []
    for hooked in (False, True):
        ddp = make_ddp()
        first = [p for n, p in ddp.module.named_parameters() if not n.startswith("second")]
        optimizer = torch.optim.AdamW(first, lr=0.01)
        if hooked:
            attach(ddp, "zero_overlap")
        train(ddp, rank, 4, optimizer=optimizer)
        optimizer.add_param_group({"params": list(ddp.module.second.parameters()), "lr": 0.02})
        before = weights(ddp)["second.weight"]
        train(ddp, rank, 4, optimizer=optimizer, first=4)
        assert not torch.equal(before, weights(ddp)["second.weight"])
        runs.append(weights(ddp))
    return distance(*runs)


def test_groups_added_later(pool):
    assert max(pool.run(_later_group, 2)) <= 1e-6


def _accumulated_by_hand(rank, world_size, cleared, views):
    """Several synchronised backwards before a step, without no_sync: wasteful, and common."""
    runs = []
    for hooked in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        if hooked:
            attach(ddp, "zero_overlap", optimizer=optimizer)
        for step in range(6):
            for micro in range(3):
                loss_of(ddp, rank, 3 * step + micro).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            if cleared != "never":
                optimizer.zero_grad(set_to_none=cleared == "to none")
        runs.append(weights(ddp))
    return distance(*runs)


@pytest.mark.parametrize("cleared", ["to none", "to zero", "never"])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_add_up_over_synchronised_backwards(pool, cleared, views):
    assert max(pool.run(_accumulated_by_hand, 3, cleared, views)) <= 1e-6


class Sometimes(nn.Module):
    """A branch that is used in every third step only, and one that a single rank uses."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.branch, self.single = nn.Linear(20, 20), nn.Linear(20, 20)
        self.calls = 0

    def forward(self, tokens):
        out = self.net(tokens)
        if self.calls % 3 == 0:
            out = out + self.branch(out)
        if dist.get_rank() == 0:
            out = out + self.single(out)
        self.calls += 1
        return out


def _sometimes(rank, world_size, options):
    runs = []
    for hooked in (False, True):
        torch.manual_seed(0)
        ddp = make_ddp(Sometimes(), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(two_groups(ddp.module), lr=0.01, eps=EPSILON)
        if hooked:
            attach(ddp, "zero_overlap", optimizer=optimizer, **options)
        train(ddp, rank, 8, optimizer=optimizer)
        runs.append(weights(ddp))
    return distance(*runs)


@pytest.mark.parametrize("options", [{}, {"step": "backward"}, {"step": "interleaved"}], ids=str)
def test_parameters_that_no_rank_used_stay_as_they_are(pool, options):
    # Momentum and weight decay would move them.
    assert max(pool.run(_sometimes, 2, options)) <= 1e-6


def _two_optimizers(rank, world_size, options):
    found = model_optimizers.optimizers_of
    if rank == 1:
        model_optimizers.optimizers_of = lambda parameters: found(parameters)[::-1]
    runs, shapes = [], []
    for hooked in (False, True):
        ddp = make_ddp()
        optimizers = [torch.optim.AdamW([group], lr=0.01, eps=EPSILON) for group in two_groups(ddp.module)]
        handle = attach(ddp, "zero_overlap", **options) if hooked else None
        for step in range(6):
            loss_of(ddp, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            ddp.zero_grad()
        if handle is not None:
            model_optimizers.optimizers_of = found
            handle.prepare_save()
            if rank == 0:
                shapes = [s["exp_avg"].shape for s in optimizers[0].state_dict()["state"].values()]
            handle.detach()
        runs.append((weights(ddp), [optimizer.state_dict()["state"] for optimizer in optimizers]))
    (plain, plain_states), (ours, states) = runs
    for a, b in zip(plain_states, states, strict=True):
        assert all(distance(a[index], b[index]) <= 1e-6 for index in a)
    return distance(plain, ours), shapes


@pytest.mark.parametrize("options", [{}, {"step": "backward"}, {"step": "interleaved"}], ids=str)
def test_two_optimizers_that_the_ranks_find_in_different_orders(pool, options):
    by_rank = pool.run(_two_optimizers, 2, options)
    assert max(off for off, _ in by_rank) <= 1e-6
    assert by_rank[0][1] == [p.shape for p in Net().parameters() if p.ndim > 1]


def _forward_before_the_step(rank, world_size):
    """Somebody looks at a loss between backward and step, and forgets no_grad."""
    runs = []
    for hooked in (False, True):
        ddp = make_ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if hooked:
            attach(ddp, "zero_overlap", optimizer=optimizer)
        norms = []
        for step in range(4):
            loss_of(ddp, rank, step).backward()
            loss_of(ddp, rank, step + 1)
            norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        runs.append({**weights(ddp), "norms": torch.stack(norms)})
    return distance(*runs)


def test_a_forward_between_backward_and_step(pool):
    assert max(pool.run(_forward_before_the_step, 2)) <= 1e-5


def _storage_replaced(rank, world_size):
    runs = []
    for hooked in (False, True):
        ddp = make_ddp()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, eps=EPSILON)
        if hooked:
            attach(ddp, "zero_overlap", optimizer=optimizer)
        train(ddp, rank, 2, optimizer=optimizer)
        for parameter in ddp.parameters():
            parameter.data = parameter.data.clone()
        train(ddp, rank, 3, optimizer=optimizer, first=2)
        runs.append(weights(ddp))
    return distance(*runs)


def test_parameters_whose_storage_is_replaced(pool):
    assert max(pool.run(_storage_replaced, 2)) <= 1e-6


def _rolled_back(rank, world_size, dtype, wire_dtype):
    """With a narrow wire, load weights and optimizer in the middle of training, as after a spike of the loss."""

    def make():
        torch.manual_seed(0)
        ddp = make_ddp(Net().to(dtype))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        return ddp, optimizer, attach(ddp, "zero_overlap", optimizer=optimizer, wire_dtype=wire_dtype)

    def go_on(ddp, optimizer, handle, masters):
        model = saved[0]["model"]
        if masters is not None:
            handle.load_state_dict(masters)
        else:  # and weights that no master is near to
            model = {name: -value for name, value in model.items()}
        ddp.module.load_state_dict(model)
        optimizer.load_state_dict(copy.deepcopy(saved[0]["optimizer"]))  # torch counts steps in what it was given
        train(ddp, rank, 3, optimizer=optimizer, first=3)
        return weights(ddp)

    old = make()
    train(old[0], rank, 3, optimizer=old[1])
    old[2].prepare_save()
    saved = [copy.deepcopy({"model": old[0].module.state_dict(), "optimizer": old[1].state_dict()})]
    dist.broadcast_object_list(saved, 0)
    masters = copy.deepcopy(old[2].state_dict())
    train(old[0], rank, 3, optimizer=old[1], first=3)
    straight = weights(old[0])
    return (
        distance(straight, go_on(*old, masters)),
        distance(straight, go_on(*make(), masters)),
        distance(go_on(*old, None), go_on(*make(), None)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire_dtype", ["bf16", "int8"])
def test_weights_loaded_later_count_with_a_narrow_wire(pool, dtype, wire_dtype):
    assert pool.run(_rolled_back, 2, dtype, wire_dtype) == [(0, 0, 0)] * 2


# Refusals.


class Whole(torch.optim.AdamW):
    """An optimizer that nobody declared."""


def _refused(rank, world_size, make):
    ddp = make_ddp()
    with pytest.raises(CompatibilityError) as caught:
        attach(ddp, "zero_overlap", optimizer=make(ddp.parameters()))
    return caught.value.text


def _lbfgs(parameters):
    return torch.optim.LBFGS(parameters)


def _undeclared(parameters):
    return Whole(parameters)


def test_optimizers_that_are_not_elementwise_are_refused(pool):
    assert "LBFGS calls its closure many times" in pool.run(_refused, 2, _lbfgs)[0]
    assert "declare it: elementwise: [Whole]" in pool.run(_refused, 2, _undeclared)[0]


def _declared(rank, world_size):
    ddp = make_ddp()
    optimizer = Whole(ddp.parameters(), lr=0.01)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer, elementwise=["Whole"])
    train(ddp, rank, 2, optimizer=optimizer)
    return handle.steps


def test_a_declared_optimizer_is_taken(pool):
    assert pool.run(_declared, 2) == [2, 2]


def _clipped_after(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters())
    attach(ddp, "zero_overlap", optimizer=optimizer, step="backward")
    with pytest.raises(CompatibilityError) as caught:
        train(ddp, rank, 1, optimizer=optimizer, clip=0.1)
    return caught.value.text


def test_clipping_after_a_step_in_backward_is_an_error(pool):
    assert "set step: optimizer" in pool.run(_clipped_after, 2)[0]


def _scaled_backward(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu")
    attach(ddp, "zero_overlap", optimizer=optimizer, step="backward", grad_scaler=scaler)
    with pytest.raises(CompatibilityError) as caught:
        scaler.scale(loss_of(ddp, rank, 0)).backward()
    return caught.value.text


def test_a_grad_scaler_with_a_step_in_backward_is_an_error(pool):
    assert "set step: optimizer" in pool.run(_scaled_backward, 2)[0]


# Overflow.


def _overflow(rank, world_size, hooked, fused):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if hooked:
        attach(ddp, "zero_overlap", optimizer=optimizer, grad_scaler=scaler)
    scales, moved = [], []
    for step in range(8):
        before = weights(ddp)
        loss = loss_of(ddp, rank, step)
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(distance(before, weights(ddp)) > 0)
    return weights(ddp), scales, moved


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_is_skipped_on_all(pool, fused):
    plain = pool.run(_overflow, 2, False, fused)
    ours = pool.run(_overflow, 2, True, fused)
    for rank in range(2):
        final, scales, moved = ours[rank]
        assert moved == [True] * 4 + [False] + [True] * 3
        assert scales == plain[rank][1] and scales[4] == scales[3] / 2 == scales[-1]
        assert distance(final, plain[rank][0]) <= 1e-6


# Parameters are whole whenever somebody looks.


def _looked_at(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer)
    seen = {}

    def step(index, look):
        loss_of(ddp, rank, index).backward()
        optimizer.step()
        ddp.zero_grad()
        assert handle.hook._gather._arriving, "nothing was under way"
        value = look()
        handle.synchronize()
        assert torch.equal(value, ddp.module.second.weight), look
        optimizer.zero_grad()

    looks = [
        lambda: ddp.module.second.weight.detach().clone(),
        lambda: dict(ddp.named_parameters())["module.second.weight"].detach().clone(),
        lambda: ddp.state_dict()["module.second.weight"].clone(),
        lambda: copy.deepcopy(ddp.module).second.weight.detach(),
        lambda: next(ddp.module.second.parameters()).detach().clone(),
    ]
    for index, look in enumerate(looks):
        step(index, look)
    seen["plain"] = all(type(m._parameters) is dict for m in ddp.modules())
    return seen


def test_whoever_reads_sees_finished_parameters(pool):
    assert all(seen["plain"] for seen in pool.run(_looked_at, 2))


def _forgotten_under_way(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer)
    train(ddp, rank, 2, optimizer=optimizer)
    assert handle.hook._gather._arriving, "nothing was under way"
    gone = [weakref.ref(ddp), weakref.ref(handle.hook)]
    del ddp, optimizer, handle
    gc.collect()
    return [reference() is None for reference in gone]


@pytest.mark.only_backend(
    "gloo", "a model is freed while it is received into; torch's backends keep its memory until then"
)
def test_a_model_is_forgotten_with_gathers_under_way(pool):
    assert pool.run(_forgotten_under_way, 2) == [[True, True]] * 2


# State: small on a rank, ordinary in a checkpoint.


def _state_size(rank, world_size):
    ddp = make_ddp(Net(64), bucket_cap_mb=25)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    attach(ddp, "zero_overlap", optimizer=optimizer)
    train(ddp, rank, 2, optimizer=optimizer)
    held = sum(t.numel() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() > 1)
    return held, 2 * sum(p.numel() for p in ddp.parameters())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_holds_its_share_of_the_state(pool, world_size):
    for held, whole in pool.run(_state_size, world_size):
        assert held <= whole / world_size * 1.02


def _process_memory(rank, world_size, hooked):
    """What training has added to the process between two steps."""

    def resident():
        ctypes.CDLL(None).malloc_trim(0)  # pages that the allocator merely keeps are not needed
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024

    before = resident()
    model = nn.Linear(5000, 4000, bias=False)  # 80 MB; AdamW's state is twice that
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, foreach=False)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer) if hooked else None
    looks = []
    for _ in range(6):
        ddp(torch.ones(1, 5000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.synchronize()
        time.sleep(0.1)  # the backend's threads let go of their last tensors
        looks.append(resident() - before)
    return min(looks[2:])  # what is kept is there at every look


def test_the_process_holds_less(own_pool):
    # The shared ranks carry what other tests left, and may let go of it meanwhile.
    plain, ours = (own_pool.run(_process_memory, 2, hooked) for hooked in (False, True))
    whole = 160_000_000
    assert min(plain) - max(ours) >= 0.4 * whole  # half of it, but for what else a process does meanwhile


def _checkpointed(rank, world_size, folder, part, hooked, options):
    """'whole': 10 steps. 'first': 5 steps and a save, as Trainer does it. 'second': load and the other 5."""
    ddp = make_ddp(Odd(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in ddp.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in ddp.parameters() if p.requires_grad and p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        eps=EPSILON,
    )
    handle = attach(ddp, "zero_overlap", optimizer=optimizer, **options) if hooked else None
    if part == "second":
        saved = torch.load(f"{folder}/both.pt", weights_only=True)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    # Every rank the same batches, so that the number of ranks makes no difference.
    train(ddp, 0, {"whole": 10, "first": 5, "second": 5}[part], optimizer=optimizer, first=5 * (part == "second"))
    if part == "first":
        if handle is not None:
            handle.prepare_save()
        if rank == 0:  # alone: nothing collective may happen in here
            torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/both.pt")
        dist.barrier()
    return weights(ddp)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, True), (2, True)),
        ((2, True), (2, False)),
        ((2, False), (2, True)),
        ((2, True), (3, True)),
        ((3, True), (2, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"shard_buckets": False}], ids=str)
def test_checkpoints_are_ordinary(pool, tmp_path, first, second, options):
    whole = pool.run(_checkpointed, first[0], str(tmp_path), "whole", first[1], options)
    pool.run(_checkpointed, first[0], str(tmp_path), "first", first[1], options)
    for final in pool.run(_checkpointed, second[0], str(tmp_path), "second", second[1], options):
        assert distance(final, whole[0]) <= 1e-6


def _alone(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters())
    attach(ddp, "zero_overlap", optimizer=optimizer)
    optimizer.state_dict()  # nothing is divided yet
    train(ddp, rank, 1, optimizer=optimizer)
    if rank == 0:
        with pytest.raises(CompatibilityError, match="prepare_save"):
            optimizer.state_dict()
    return True


def test_state_dict_on_one_rank_alone_does_not_hang(pool):
    assert pool.run(_alone, 2, timeout=30) == [True, True]


def _detached(rank, world_size):
    runs = []
    for hooked in (False, True):
        ddp = make_ddp()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        handle = attach(ddp, "zero_overlap", optimizer=optimizer) if hooked else None
        train(ddp, rank, 5, optimizer=optimizer)
        if handle is not None:
            handle.detach()
        train(ddp, rank, 5, optimizer=optimizer, first=5)
        runs.append(weights(ddp))
    return distance(*runs)


def test_training_goes_on_after_detach(pool):
    assert max(pool.run(_detached, 2)) <= 1e-6


def _masters(rank, world_size, wire_dtype):
    def run(first, steps, saved=None):
        ddp = make_ddp()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        handle = attach(ddp, "zero_overlap", optimizer=optimizer, wire_dtype=wire_dtype)
        if saved:
            handle.load_state_dict(saved["hook"])
            ddp.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(ddp, rank, steps, optimizer=optimizer, first=first)
        return ddp, optimizer, handle

    ddp, optimizer, handle = run(0, 5)
    handle.prepare_save()
    saved = [{"model": copy.deepcopy(ddp.module.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}]
    dist.broadcast_object_list(saved, 0)
    resumed = run(5, 5, {**saved[0], "hook": handle.state_dict()})[0]
    train(ddp, rank, 5, optimizer=optimizer, first=5)
    return distance(weights(ddp), weights(resumed))


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8"])
def test_masters_of_a_narrow_wire_resume(pool, wire_dtype):
    assert max(pool.run(_masters, 2, wire_dtype)) <= 1e-7


def _written_after_load(rank, world_size, wire_dtype):
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer, wire_dtype=wire_dtype)
    train(ddp, rank, 3, optimizer=optimizer)
    handle.prepare_save()
    handle.load_state_dict(handle.state_dict())
    with torch.no_grad():
        ddp.module.first.weight.fill_(0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    train(ddp, rank, 1, optimizer=optimizer, first=3)
    return float((ddp.module.first.weight.detach() - 0.5).abs().max())


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8"])
def test_weights_written_after_a_load_replace_masters(pool, wire_dtype):
    assert pool.run(_written_after_load, 2, wire_dtype) == [0.0, 0.0]


# Out of step, and compiled.


def _sleepy(rank, world_size, steps):
    ddp = make_ddp(bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    attach(ddp, "zero_overlap", optimizer=optimizer)
    chance = random.Random(rank)
    for p in ddp.parameters():
        p.register_hook(lambda g: time.sleep(chance.random() * 0.004) if chance.random() < 0.1 else None)
    train(ddp, rank, steps, optimizer=optimizer, clip=1.0, on_step=lambda s: time.sleep(chance.random() * 0.004))
    return weights(ddp)


def test_five_hundred_steps_out_of_step(pool):
    by_rank = pool.run(_sleepy, 3, 500, timeout=200)
    assert all(distance(final, by_rank[0]) == 0 for final in by_rank)


def _compiled(rank, world_size):
    runs = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = Net()
        model = torch.compile(model, backend="eager")
        ddp = make_ddp(model, bucket_cap_mb=25)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        if hooked:
            attach(ddp, "zero_overlap", optimizer=optimizer)
        train(ddp, rank, 5, optimizer=optimizer)
        runs.append(weights(ddp))
    return distance(*runs)


def test_a_compiled_module(pool):
    assert max(pool.run(_compiled, 2)) <= 1e-6


def _part_of_a_state(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = attach(ddp, "zero_overlap", optimizer=optimizer)
    train(ddp, rank, 2, optimizer=optimizer)
    handle.prepare_save()
    state = copy.deepcopy(optimizer.state_dict())
    text = ""
    try:
        torch.save(state, io.BytesIO())
    except CompatibilityError as error:
        text = error.text
    optimizer.load_state_dict(state)
    train(ddp, rank, 1, optimizer=optimizer, first=2)
    return text


def test_a_rank_cannot_save_its_part_for_the_whole(pool):
    """Both ranks are on one node, whose first rank has the whole state."""
    first, second = pool.run(_part_of_a_state, 2)
    assert first == ""
    assert "this rank has only its part of the optimizer's state" in second and "save it there" in second

"""PowerSGD against torch's own hook, the paper's invariant, and the ways in which the stock hook fails."""

import dataclasses
import random
import time

import pytest
import torch
import torch.distributed as dist
from models import Net, distance, loss_of, make_ddp, train, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

from accel_commhooks import CommHookConfig, attach
from accel_commhooks.hooks.host import as_on_accelerator

WIDTH = 32
OPTIONS = [
    {},
    {"matrix_approximation_rank": 1},
    {"matrix_approximation_rank": 6},
    {"alternate": True},
    {"wire_dtype": "bf16"},
    {"wire_dtype": "fp16"},
    {"alternate": True, "wire_dtype": "bf16"},
    {"warm_start": False},
    {"batch_tensors_with_same_shape": True},
    {"orthogonalization_epsilon": 1e-6},
    {"exclude": ["*first*"]},
    {"include": ["second.weight"]},
    {"ranks": {"embed*": 1}},
    {"wrapper": "bf16"},
    {"wire_dtype": "int8"},
    {"wire_dtype": "int8", "alternate": True},
    {"wire_dtype": "int8", "use_error_feedback": True, "matrix_approximation_rank": 4, "warm_start": False},
]


def _gradients(ddp):
    return {name: p.grad.detach().clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def _mean(tensors):
    result = {}
    for name, value in tensors.items():
        result[name] = value.clone()
        dist.all_reduce(result[name])
        result[name] /= dist.get_world_size()
    return result


# Equality with torch.


def _against_torch(rank, world_size):
    """In double precision: what rounding makes of two runs in float32 grows from step to step."""
    ours, theirs = (make_ddp(Net(WIDTH).double(), bucket_cap_mb=100) for _ in range(2))
    theirs.module.load_state_dict(ours.module.state_dict())
    attach(ours, "powersgd", matrix_approximation_rank=2, start_powerSGD_iter=2)
    state = stock.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    theirs.register_comm_hook(state, _ours_first_q_then(stock.powerSGD_hook))
    differences, effect = [], 0.0
    for step in range(22):
        for ddp in (ours, theirs):
            ddp.zero_grad()
            loss_of(ddp, rank, step).backward()
        differences.append(distance(_gradients(ours), _gradients(theirs)))
        if step == 21:
            local = dict(
                zip(
                    [n for n, _ in ours.module.named_parameters()],
                    torch.autograd.grad(loss_of(ours.module, rank, step), list(ours.module.parameters())),
                    strict=True,
                )
            )
            effect = distance(_mean(local), _gradients(ours))
        for ddp in (ours, theirs):
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
        # A loop without an optimizer: the next backward shows that the step is over.
    return differences, effect


def _ours_first_q_then(hook):
    """torch draws its first Q by bucket; give it the ones that ours draws by name, so that the runs are comparable."""
    from accel_commhooks.hooks.powersgd.bases import orthonormal_bases
    from accel_commhooks.hooks.powersgd.lowrank import random_factor

    def wrapped(state, bucket):
        if state.iter >= state.start_powerSGD_iter and 0 not in state.p_memory_dict:
            names = {id(p): n for n, p in _named.items()}
            by_shape = {}
            for p in bucket.parameters():
                rows, columns = p.shape[0], p.numel() // p.shape[0]
                r = min(rows, columns, state.matrix_approximation_rank)
                if (rows + columns) * r * state.min_compression_rate < rows * columns:
                    by_shape.setdefault((rows, columns), []).append((names[id(p)], rows, columns, r))
            ps = [x for same in by_shape.values() for x in same]
            qs = [random_factor(r, c, key=n, seed=0).double() for n, _, c, r in ps]
            qs = [orthonormal_bases([q[None]])[0][0].t() for q in qs]
            state.p_memory_dict[0] = torch.empty(sum(rows * r for _, rows, _, r in ps))
            state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in qs])
            for kept in (state.p_memory_dict, state.q_memory_dict):
                kept[0] = kept[0].to(bucket.buffer())
        return hook(state, bucket)

    return wrapped


_named: dict = {}


def _against_torch_named(rank, world_size):
    real = nn.parallel.DistributedDataParallel.register_comm_hook

    def remember(self, state, hook):
        if isinstance(state, stock.PowerSGDState):
            _named.update(dict(self.module.named_parameters()))
        return real(self, state, hook)

    nn.parallel.DistributedDataParallel.register_comm_hook = remember
    try:
        return _against_torch(rank, world_size)
    finally:
        nn.parallel.DistributedDataParallel.register_comm_hook = real
        _named.clear()


def test_one_bucket_gives_torchs_gradients(own_pool):
    for differences, effect in own_pool.run(_against_torch_named, 2, expendable=True):
        assert effect > 1e-3, "compression did not act"
        assert max(differences) <= 1e4 * torch.finfo(torch.float64).eps, "rounding grew 200 times in float32"


# The paper's invariant.


def _invariant(rank, world_size, name, options):
    ddp = make_ddp(Net(WIDTH))
    handle = attach(ddp, name, start_powerSGD_iter=0, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    names = [n for n, _ in ddp.module.named_parameters()]
    worst, lossy = 0.0, 0.0
    previous = {}
    for step in range(6):
        local = torch.autograd.grad(loss_of(ddp.module, rank, step), list(ddp.module.parameters()))
        mean_input = _mean(dict(zip(names, local, strict=True)))
        loss_of(ddp, rank, step).backward()
        output = _gradients(ddp)
        errors = handle.state_dict()["error"]
        for n in names:
            before = previous.get(n, torch.zeros_like(output[n]).view(-1))
            after = errors.get(n, torch.zeros_like(output[n]).view(-1))
            both = _mean({"before": before.clone(), "after": after.clone()})
            balance = mean_input[n].view(-1) + both["before"] - output[n].view(-1) - both["after"]
            worst = max(worst, float(balance.abs().max()))
            lossy = max(lossy, float((mean_input[n] - output[n]).abs().max()))
        previous = {n: e.clone() for n, e in errors.items()}
        optimizer.step()
        optimizer.zero_grad()
    return worst, lossy, weights(ddp)


def _elsewhere(rank, world_size, function, *args):
    """The way that an accelerator takes."""
    with as_on_accelerator():
        return function(rank, world_size, *args)


def _here(rank, world_size, function, *args):
    return function(rank, world_size, *args)


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_input_and_error_are_conserved(pool, options, way):
    by_rank = pool.run(way, 3 if options == {} else 2, _invariant, "powersgd", options)
    for worst, lossy, final in by_rank:
        assert lossy > 1e-4, "compression did not act"
        assert worst <= 1e-5
        assert distance(final, by_rank[0][2]) == 0


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"wire_dtype": "bf16"}, {"wire_dtype": "int8"}], ids=str)
def test_batched_conserves_input_and_error(pool, options, way):
    for worst, lossy, _ in pool.run(way, 2, _invariant, "batched_powersgd", options):
        assert lossy > 1e-4
        assert worst <= 1e-5


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("options", [{}, {"wire_dtype": "int8"}, {"wire_dtype": "int8", "scope": "all"}], ids=str)
def test_node_scope_conserves_input_and_error(pool, ranks_per_node, options, way):
    options = {"scope": "node", "ranks_per_node": ranks_per_node, **options}
    for worst, lossy, _ in pool.run(way, 4, _invariant, "powersgd", options):
        assert lossy > 1e-4
        assert worst <= 1e-5


# Agreement when ranks are out of step.


def _soak(rank, world_size, steps, sleeps, options):
    ddp = make_ddp(Net(16), bucket_cap_mb=0.0005)
    handle = attach(ddp, "powersgd", start_powerSGD_iter=2, **options)
    chance = random.Random(rank)
    if sleeps:
        for p in ddp.parameters():
            p.register_hook(lambda g: time.sleep(chance.random() * 0.01) if chance.random() < 0.2 else None)
    train(ddp, rank, steps)
    return weights(ddp), handle.steps, handle.comm.traffic.calls["all_reduce"]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("sleeps", [False, True])
def test_two_hundred_steps_with_many_buckets(pool, world_size, sleeps):
    by_rank = pool.run(_soak, world_size, 200, sleeps, {}, timeout=200)
    for final, steps, calls in by_rank:
        assert steps == 200
        assert calls > 2 * 198  # more than one bucket: the stock hook hangs here
        assert distance(final, by_rank[0][0]) == 0


def test_alternate_and_node_scope_out_of_step(pool):
    for options in ({"alternate": True}, {"scope": "node", "ranks_per_node": 2}):
        by_rank = pool.run(_soak, 4, 40, True, options)
        assert all(distance(final, by_rank[0][0]) == 0 for final, _, _ in by_rank)


# What the stock hook does wrong.


class ZeroLayer(nn.Module):
    """The second layer's gradient is exactly zero on every rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x):
        return self.first(x) + 0.0 * self.second(x)


def _zero_gradient(rank, world_size, ours):
    ddp = make_ddp(ZeroLayer(), bucket_cap_mb=100)
    if ours:
        attach(ddp, "powersgd", matrix_approximation_rank=2, start_powerSGD_iter=0)
    else:
        ddp.register_comm_hook(
            stock.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), stock.powerSGD_hook
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(step)
        ddp(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return all(torch.isfinite(p).all() for p in ddp.parameters())


def test_a_zero_gradient_is_no_nan(pool, own_pool):
    stock_is_finite = own_pool.run(_zero_gradient, 2, False, expendable=True)
    assert stock_is_finite == [False, False], "the stock hook no longer fails: drop this claim"
    assert pool.run(_zero_gradient, 2, True) == [True, True]


class Dimmed(nn.Module):
    """A layer whose gradient has the rank of its input: none, one, then all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 24, bias=False)

    def forward(self, x):
        return self.layer(x)


def _low_rank_for_a_while(rank, world_size, options, lit):
    """How much of a constant gradient of rank 4 arrives in 40 steps, after steps in which it had a lower rank."""
    ddp = make_ddp(Dimmed())
    handle = attach(ddp, "powersgd", matrix_approximation_rank=4, start_powerSGD_iter=0, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    torch.manual_seed(0)
    left, right = torch.randn(4, 24), torch.randn(4, 32)
    arrived = torch.zeros(24, 32)
    for step in range(46):
        shown = 4 if step >= 6 else lit
        mask = (torch.arange(4) < shown).float()[:, None]
        (ddp(right * mask) * left).sum().backward()
        if step >= 6:
            arrived += ddp.module.layer.weight.grad
        optimizer.step()
        optimizer.zero_grad()
    assert handle.metrics()["comm_compression"] > 1
    return float((arrived / 40 - left.t() @ right).norm() / (left.t() @ right).norm())


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize(
    "options", [{}, {"alternate": True}, {"orthogonalization_epsilon": 1e-12}, {"wire_dtype": "int8"}], ids=str
)
@pytest.mark.parametrize("lit", [0, 1])
def test_a_gradient_of_low_rank_does_not_cost_the_rank_for_good(pool, options, lit, way):
    """A factor that became zero must find a direction again: else what it should send stays in the residual for ever."""
    assert max(pool.run(way, 2, _low_rank_for_a_while, options, lit)) < 0.1


def _scaled_run(rank, world_size, hook, steps, overflow_at, growth_interval):
    """A run under a GradScaler; with overflow_at, rank 1 alone has an infinite gradient there."""
    ddp = make_ddp(Net(WIDTH), bucket_cap_mb=100 if hook == "stock" else 0.004)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
    handle = None
    if hook == "stock":
        ddp.register_comm_hook(
            stock.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), stock.powerSGD_hook
        )
    else:
        options = {"alternate": {"alternate": True}, "digits": {"wire_dtype": "int8"}}.get(hook, {})
        handle = attach(
            ddp, "powersgd", grad_scaler=scaler, matrix_approximation_rank=2, start_powerSGD_iter=2, **options
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = after = None
    scales = []
    step = 0
    while step < steps:
        overflow = step == overflow_at
        if overflow and handle is not None:
            before = handle.state_dict()
        loss = loss_of(ddp, rank, step)
        if overflow and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if overflow:
            overflow_at = None
            after = handle.state_dict() if handle is not None else None
            continue  # the same batch again: the step was skipped
        step += 1
    return weights(ddp), scales, before, after


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize("hook", ["ours", "alternate", "digits"])
def test_one_overflow_is_as_if_nothing_happened(pool, hook, way):
    clean = pool.run(way, 2, _scaled_run, hook, 12, None, 1000)
    stumbled = pool.run(way, 2, _scaled_run, hook, 12, 6, 1000)
    for rank in range(2):
        final, scales, before, after = stumbled[rank]
        assert scales[6] == scales[5] / 2 and scales[-1] == scales[6], "the scale must fall once, on every rank"
        for kind in ("q", "p", "error"):
            for name in before[kind]:
                assert torch.equal(before[kind][name], after[kind][name]), (kind, name)
        # Scales are powers of two, which multiply without rounding: the runs are the same run.
        assert distance(final, clean[rank][0]) <= 1e-7


def test_the_stock_hook_never_recovers_from_an_overflow(own_pool):
    scales = own_pool.run(_scaled_run, 2, "stock", 12, 6, 1000, expendable=True)[0][1]
    assert scales[-1] < scales[6] / 2, "the stock hook no longer fails: drop this claim"


def test_residuals_follow_the_loss_scale(pool, own_pool):
    steady = pool.run(_scaled_run, 2, "ours", 20, None, 1000)
    growing = pool.run(_scaled_run, 2, "ours", 20, None, 3)
    assert growing[0][1][-1] > 8 * steady[0][1][-1]
    assert distance(growing[0][0], steady[0][0]) <= 1e-7
    stock_steady = own_pool.run(_scaled_run, 2, "stock", 20, None, 1000, expendable=True)
    stock_growing = own_pool.run(_scaled_run, 2, "stock", 20, None, 3, expendable=True)
    assert distance(stock_growing[0][0], stock_steady[0][0]) > 1e-4, "the stock hook no longer fails: drop this claim"


def _batched_stock(rank, world_size):
    ddp = make_ddp(Net(WIDTH), bucket_cap_mb=100)
    ddp.register_comm_hook(stock.PowerSGDState(None, start_powerSGD_iter=2), stock.batched_powerSGD_hook)
    try:
        train(ddp, rank, 4)
    except Exception as error:
        return repr(error)
    return "ran"


def test_the_stock_batched_hook_fails_at_its_first_compressed_step(own_pool):
    # It dies inside backward: such a process is not fit for another test.
    assert "AssertionError" in own_pool.run(_batched_stock, 2)[0], "the stock hook no longer fails: drop this claim"


def _reload_stock(rank, world_size):
    import pickle

    ddp = make_ddp(Net(WIDTH), bucket_cap_mb=0.02)
    state = stock.PowerSGDState(None, start_powerSGD_iter=2)
    state.error_dict[0] = torch.zeros(7)  # what a bucket of another size left under this index
    state.p_memory_dict[0], state.q_memory_dict[0] = torch.zeros(3), torch.zeros(3)
    state = pickle.loads(pickle.dumps(state))
    state.iter = 5
    ddp.register_comm_hook(state, stock.powerSGD_hook)
    try:
        loss_of(ddp, rank, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "ran"


def test_the_stock_state_does_not_survive_other_buckets(own_pool):
    assert "size" in own_pool.run(_reload_stock, 2)[0], "the stock hook no longer fails: drop this claim"


# Parameters that come and go.


class Branches(nn.Module):
    """Which branches are used is chosen by the test."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(32, 32)
        self.left = nn.Linear(32, 32)
        self.right = nn.Linear(32, 32)
        self.use = ("left", "right")

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return sum(getattr(self, name)(hidden) for name in self.use)


def _unused(rank, world_size, plan, options):
    ddp = make_ddp(Branches(), bucket_cap_mb=0.005, find_unused_parameters=True)
    handle = attach(ddp, "powersgd", matrix_approximation_rank=1, start_powerSGD_iter=0, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    kept = []
    for step, by_rank in enumerate(plan):
        ddp.module.use = by_rank[rank]
        before = handle.state_dict()["error"].get("right.weight")
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(8, 32)).square().mean().backward()
        after = handle.state_dict()["error"]["right.weight"]
        kept.append(before is not None and torch.equal(before, after))
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp), kept


@pytest.mark.parametrize("way", [_here, _elsewhere])
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("wire_dtype", [None, "int8"])
def test_unused_parameters_keep_their_residual(pool, way, alternate, wire_dtype):
    both, left = ("left", "right"), ("left",)
    plan = [(both, both), (left, left), (left, both), (both, both)]
    by_rank = pool.run(way, 2, _unused, plan, {"alternate": alternate, "wire_dtype": wire_dtype})
    for final, kept in by_rank:
        assert kept == [False, True, False, False]
        assert distance(final, by_rank[0][0]) == 0


def _thaw(rank, world_size):
    ddp = make_ddp(Branches(), bucket_cap_mb=0.005, find_unused_parameters=True)
    attach(ddp, "powersgd", matrix_approximation_rank=2, start_powerSGD_iter=0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    start = weights(ddp)
    moved = []
    for step in range(9):
        ddp.module.right.weight.requires_grad_(step < 3 or step >= 6)
        before = ddp.module.right.weight.detach().clone()
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, ddp.module.right.weight))
    return weights(ddp), moved, start


def test_frozen_parameters_may_thaw(pool):
    by_rank = pool.run(_thaw, 2)
    for final, moved, _ in by_rank:
        assert moved == [True] * 3 + [False] * 3 + [True] * 3
        assert distance(final, by_rank[0][0]) == 0


# Types and sizes.


def _dtype(rank, world_size, dtype):
    ddp = make_ddp(Net(WIDTH).to(dtype))
    handle = attach(ddp, "powersgd", start_powerSGD_iter=0)
    # oneDNN's bf16 kernels use instructions that some virtual machines announce and do not have.
    with torch.backends.mkldnn.flags(enabled=False):
        train(ddp, rank, 5)
    state = handle.state_dict()
    return weights(ddp), {t.dtype for kind in ("q", "error") for t in state[kind].values()}


@pytest.mark.parametrize(
    ("dtype", "math"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_mathematics_in_at_least_float32(pool, dtype, math):
    by_rank = pool.run(_dtype, 2, dtype)
    for final, kinds in by_rank:
        assert kinds == {math}
        assert all(torch.isfinite(w).all() for w in final.values())
        assert distance(final, by_rank[0][0]) == 0


def _excluded(rank, world_size, options):
    ddp = make_ddp(Net(WIDTH))
    attach(ddp, "powersgd", start_powerSGD_iter=0, **options)
    loss_of(ddp, rank, 0).backward()
    local = torch.autograd.grad(loss_of(ddp.module, rank, 0), list(ddp.module.parameters()))
    exact = _mean(dict(zip([n for n, _ in ddp.module.named_parameters()], local, strict=True)))
    return {name: float((exact[name] - g).abs().max()) > 1e-6 for name, g in _gradients(ddp).items()}


@pytest.mark.parametrize(
    ("options", "compressed"),
    [
        ({}, {"first.weight", "second.weight", "embed.weight"}),
        ({"exclude": ["embed*"]}, {"first.weight", "second.weight"}),
        ({"include": ["*second*"]}, {"second.weight"}),
        ({"ranks": {"first*": 0}}, {"second.weight", "embed.weight"}),
    ],
)
def test_patterns_choose_what_is_compressed(pool, options, compressed):
    lossy = pool.run(_excluded, 2, options)[0]
    assert {name for name, is_lossy in lossy.items() if is_lossy} == compressed


def _one_node(rank, world_size):
    ddp = make_ddp(Net(WIDTH))
    handle = attach(ddp, "powersgd", start_powerSGD_iter=0, scope="node")
    train(ddp, rank, 3)
    return handle.metrics()["comm_compression"]


def test_node_scope_on_one_node_averages_plainly(pool):
    assert pool.run(_one_node, 2) == pytest.approx([1.0, 1.0], rel=0.01)


# The rank and the type that are taken where one is not given.


@pytest.mark.parametrize(
    ("hook", "given", "rank", "wire_dtype"),
    [
        ("powersgd", {}, 15, "int8"),
        ("powersgd", {"wire_dtype": "auto"}, 15, "int8"),
        ("powersgd", {"wire_dtype": "int8"}, 15, "int8"),
        ("powersgd", {"wire_dtype": None}, 4, None),
        ("powersgd", {"wire_dtype": "bf16"}, 4, "bf16"),
        ("powersgd", {"matrix_approximation_rank": 2}, 2, None),
        ("powersgd", {"matrix_approximation_rank": 2, "wire_dtype": "int8"}, 2, "int8"),
        ("powersgd", {"ranks": {"*": 4}}, 4, None),
        ("powersgd", {"ranks": {"head.*": 0}}, 15, "int8"),
        ("batched_powersgd", {}, 4, None),
        ("batched_powersgd", {"matrix_approximation_rank": None}, 4, None),
    ],
    ids=str,
)
def test_a_config_that_names_a_rank_means_float32(hook, given, rank, wire_dtype):
    options = CommHookConfig(hook, given).build_options()
    assert (options.matrix_approximation_rank, options.wire_dtype) == (rank, wire_dtype)
    again = CommHookConfig(hook, dataclasses.asdict(options)).build_options()
    assert again == options

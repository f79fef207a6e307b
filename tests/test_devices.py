"""What differs between devices: backends, autocast, streams, the current device. Stand-ins where there is no device."""

import contextlib
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import distance, loss_of, make_ddp, weights
from torch import nn

from accel_commhooks import attach
from accel_commhooks.comm.backends import Backends
from accel_commhooks.comm.collectives import Communicator
from accel_commhooks.hooks.host import as_on_accelerator
from accel_commhooks.hooks.powersgd import bases
from accel_commhooks.upstream import devices

# Backends.


@pytest.mark.parametrize(
    ("given", "config", "expected", "name"),
    [
        ("nccl", "cpu:nccl,cuda:nccl", {"cpu": "nccl", "cuda": "nccl"}, "nccl"),
        ("undefined", "cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}, "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}, "cpu:gloo,cuda:nccl"),
    ],
)
def test_the_tensor_decides_which_backend_it_is(monkeypatch, given, config, expected, name):
    monkeypatch.setattr(dist, "get_backend", lambda group: given)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    backends = Backends.of(None)
    assert (backends.by_device, backends.name) == (expected, name)
    for kind, backend in expected.items():
        assert backends.of_tensor(SimpleNamespace(device=torch.device(kind))) == backend
    assert backends.of_tensor(torch.empty(1, device="meta")) in expected.values()


def _unnamed(rank, world_size, given):
    """The group is made again by init_process_group(), with less than a name of one backend."""
    store = dist.PrefixStore("unnamed", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(given, store=store, rank=rank, world_size=world_size)
    comm = Communicator(ranks_per_node=1)
    out = torch.empty(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.reduce_scatter(out, torch.arange(2.0 * world_size).view(world_size, 2)).wait()
    group = comm.subgroup([range(world_size)])
    total = comm.all_reduce(torch.ones(1), mean=False, group=group).wait()
    return dict(comm.traffic.sent), out.tolist(), float(total)


@pytest.mark.only_backend("gloo", "the groups it makes are of Gloo")
@pytest.mark.parametrize("given", [None, "cpu:gloo"])
def test_a_group_without_a_name_is_known_for_gloo(pool, given):
    for rank, (sent, out, total) in enumerate(pool.run(_unnamed, 2, given)):
        assert sent["reduce_scatter", "between"] == 2 * 4, "as Gloo's all-to-all, not twice as much"
        assert out == [2.0 * rank, 2.0 * rank + 1]
        assert total == 2


def _no_warnings(rank, world_size):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(ddp, "zero_overlap", optimizer=optimizer)
        for step in range(3):
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_no_deprecated_collective_is_called(pool):
    pool.run(_no_warnings, 2)


# Autocast.


class _Given(nn.Module):
    """Its gradients are what it is given: autocast, which narrows the products of a backward, has none to narrow."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.zeros(40, 24))

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True))


@contextlib.contextmanager
def _as_on_mps():
    """As on an accelerator without double precision, where bases are made of products in float32."""
    with as_on_accelerator(), mock.patch.object(bases, "_wide_type", lambda tensor: tensor.dtype):
        yield


def _in_autocast(rank, world_size, hook, options, autocast, way):
    ddp = make_ddp(_Given())
    device = next(ddp.parameters()).device
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attach(ddp, hook, optimizer=optimizer, **options)
    chance = torch.Generator().manual_seed(rank)
    for _ in range(4):
        gradients = [torch.randn(p.shape, generator=chance).to(device) for p in ddp.parameters()]
        loss = ddp(gradients)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast), way():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


@pytest.mark.parametrize("way", [contextlib.nullcontext, as_on_accelerator, _as_on_mps])
@pytest.mark.parametrize(
    ("hook", "options"),
    [("powersgd", {"start_powerSGD_iter": 0}), ("batched_powersgd", {"start_powerSGD_iter": 0}), ("zero_overlap", {})],
)
def test_autocast_around_backward_changes_nothing(pool, hook, options, way):
    plain, under = (pool.run(_in_autocast, 2, hook, options, autocast, way) for autocast in (False, True))
    for rank in range(2):
        assert float(plain[rank]["first"].abs().max()) > 0.1, "nothing was learned"
        assert distance(plain[rank], under[rank]) == 0


def test_autocast_would_have_changed_products():
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (rows @ rows.t()).dtype == torch.bfloat16
        with devices.without_autocast(rows.device):
            assert (rows @ rows.t()).dtype == torch.float32


# Streams and the current device, with a stand-in for a device's module.


class _Stream:
    def __init__(self, name):
        self.name, self.waits_for = name, []

    def wait_stream(self, other):
        self.waits_for.append(other.name)


class _DeviceModule:
    """What torch.cuda offers, as far as it is used."""

    def __init__(self):
        self.now, self.index = _Stream("main"), 0

    def current_stream(self, device):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextlib.contextmanager
    def device(self, device):
        before, self.index = self.index, device.index
        yield
        self.index = before


@pytest.fixture
def cuda(monkeypatch):
    module = _DeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_what_is_finished_on_another_stream_runs_on_its_own_and_is_waited_for(cuda):
    main, side = cuda.now, _Stream("side")
    ran_on = []
    finish = devices.on_this_stream(lambda: ran_on.append(cuda.now.name), torch.device("cuda:0"))
    finish()
    with cuda.stream(side):
        finish()
    assert ran_on == ["main", "main"]
    assert side.waits_for == ["main"] and main.waits_for == []


def test_objects_are_gathered_on_the_models_device(cuda, monkeypatch):
    seen = []

    def gather(gathered, own, group):
        seen.append(cuda.index)
        gathered[:] = [own] * len(gathered)

    comm = Communicator.__new__(Communicator)
    comm.size, comm.everyone, comm._process_group, comm._device = 2, None, None, torch.device("cuda:1")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert comm.gather_objects("x") == ["x", "x"]
    assert seen == [1] and cuda.index == 0


def test_a_cpu_has_no_streams():
    calls = []
    devices.on_this_stream(lambda: calls.append(1), torch.device("cpu"))()
    with devices.current(torch.device("cpu")), devices.current(None):
        assert calls == [1]

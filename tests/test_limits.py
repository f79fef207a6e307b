"""What cannot work is refused in plain words, on every rank, at the first sign; what plain DDP can do, allreduce can do."""

import copy

import pytest
import torch
from models import distance, loss_of, make_ddp, weights
from test_steps import HOOKS, every_hook
from torch import nn

from accel_commhooks import attach
from accel_commhooks.config.errors import CommHookError

PLAIN = ("allreduce", "fp16_compress", "bf16_compress")


def _refused(action):
    with pytest.raises(CommHookError) as raised:
        action()
    return str(raised.value)


def _joins(rank, world_size, name):
    ddp = make_ddp()
    attach(ddp, name, **HOOKS[name])

    def joined():
        with ddp.join():
            loss_of(ddp, rank, 0)

    return _refused(joined)


@every_hook
def test_join_is_refused(pool, name):
    assert all("inside `with ddp.join():`" in text for text in pool.run(_joins, 2, name))


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=kind == "sparse")
        self.head = nn.Linear(8, 20)
        if kind == "complex":
            self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if hasattr(self, "phase"):
            hidden = (hidden * self.phase).real + (hidden * self.phase).imag
        return self.head(hidden)


def _odd_tensors(rank, world_size, name, kind):
    ddp = make_ddp(Odd(kind))
    handle = attach(ddp, name, **HOOKS.get(name, {})) if name is not None else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(handle.comm.traffic.sent.values()) if handle is not None else None
    return {n: torch.view_as_real(w) if w.is_complex() else w for n, w in weights(ddp).items()}, sent


@pytest.mark.parametrize("kind", ["sparse", "complex"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_hooks_average_sparse_and_complex_gradients(pool, name, kind):
    (final, sent), (other, _) = pool.run(_odd_tensors, 2, name, kind)
    assert sent > 0
    assert distance(final, other) == 0
    expected = pool.run(_odd_tensors, 2, None, kind)[0][0]
    assert distance(final, expected) <= (1e-6 if name == "allreduce" else 1e-2)


def _refuses_odd(rank, world_size, name, kind):
    ddp = make_ddp(Odd(kind))
    return _refused(lambda: attach(ddp, name, **HOOKS[name]))


@pytest.mark.parametrize("kind", ["sparse", "complex"])
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "allreduce"])
def test_other_hooks_refuse_them(pool, name, kind):
    named = {"sparse": "'embed' has sparse ones", "complex": "'phase' is torch.complex64"}[kind]
    assert all(named in text and "use name: allreduce" in text for text in pool.run(_refuses_odd, 2, name, kind))


def _two_devices(rank, world_size, name):
    ddp = make_ddp()
    ddp.module.first.to("meta")  # the only other device that is here
    return _refused(lambda: attach(ddp, name, **HOOKS[name]))


@every_hook
def test_two_devices_are_refused(pool, name):
    assert all("parameters on one device" in text for text in pool.run(_two_devices, 2, name))


def _captured(rank, world_size):
    ddp = make_ddp()
    attach(ddp, "powersgd", **HOOKS["powersgd"])
    loss = loss_of(ddp, rank, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return _refused(loss.backward)


def test_capturing_a_cuda_graph_is_refused(pool):
    assert all("a CUDA graph is being captured" in text for text in pool.run(_captured, 2))


def _lbfgs(rank, world_size, name):
    ddp = make_ddp()
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=4)
    handle = attach(ddp, name, **HOOKS[name])

    def closure():
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, 0)
        loss.backward()
        return loss

    if name != "allreduce":
        return _refused(lambda: optimizer.step(closure))
    first, last = optimizer.step(closure), optimizer.step(closure)
    return float(last) < float(first), handle.steps


@every_hook
def test_lbfgs_is_refused_where_it_cannot_work(pool, name):
    for answer in pool.run(_lbfgs, 2, name):
        assert answer == (True, 2) if name == "allreduce" else ("LBFGS" in answer)


def _detach_in_step(rank, world_size, name):
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, name, optimizer=optimizer, **HOOKS[name])
    for step in range(4):
        loss_of(ddp, rank, step).backward()
        text = _refused(handle.detach)
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return text, weights(ddp)


@every_hook
def test_a_detach_between_backward_and_step_is_refused(pool, name):
    first, second = pool.run(_detach_in_step, 2, name)
    assert "between backward and optimizer.step()" in first[0] and first[0] == second[0]
    assert distance(first[1], second[1]) == 0, "replicas are left equal"


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, pictures):
        return self.second(torch.relu(self.first(pictures)))


def _channels_last(rank, world_size, name, options, memory_format):
    torch.manual_seed(0)
    ddp = make_ddp(Pictures().to(memory_format=memory_format), gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, name, optimizer=optimizer, **options)
    for step in range(8):
        pictures = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(pictures.to(memory_format=memory_format)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.synchronize()
    return copy.deepcopy(weights(ddp))


@pytest.mark.parametrize(
    "options",
    [
        {"outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9}},
        {"overlap_steps": 1},
        {"wire_dtype": None},
    ],
    ids=["outer", "overlap", "plain"],
)
def test_channels_last_is_averaged_as_it_lies(pool, options):
    local = {"start_localSGD_iter": 1, "period": 3, "subgroup": "none", **options}
    last, first = (
        pool.run(_channels_last, 2, "post_localsgd", local, memory_format)
        for memory_format in (torch.channels_last, torch.contiguous_format)
    )
    assert distance(last[0], last[1]) == 0
    assert distance(last[0], first[0]) <= 1e-5

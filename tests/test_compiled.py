"""torch.compile around a model with a hook: one graph, compiled once, and what plain DDP computes."""

import pytest
import torch
from models import distance, loss_of, make_ddp, weights
from torch import nn

from accel_commhooks import attach
from accel_commhooks.upstream.compiling import CompileWatch

STEPS = 6


def _compile(ddp, way, backend):
    """Whatever is called in the place of the DDP model."""
    if way == "around":
        return torch.compile(ddp, backend=backend)
    if way == "in place":
        ddp.compile(backend=backend)
        return ddp
    if way == "the caller":
        return torch.compile(lambda tokens: ddp(tokens), backend=backend)
    return ddp


def _train(rank, world_size, hook, way):
    """(graphs, operators in them, weights, what the script saw after each step)"""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    ddp, counter = make_ddp(bucket_cap_mb=25), CompileCounter()
    called = _compile(ddp, way, counter)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = attach(ddp, hook, optimizer=optimizer) if hook else None
    seen = []
    for step in range(STEPS):
        loss_of(called, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            seen.append(float(ddp.module.first.weight.sum()))
    if handle is not None:
        handle.synchronize()
    return counter.frame_count, counter.op_count, weights(ddp), seen


@pytest.fixture(scope="module")
def plain(own_pool):
    return {way: own_pool.run(_train, 2, None, way)[0] for way in ("around", "eager")}


@pytest.mark.parametrize("way", ["around", "in place", "the caller"])
@pytest.mark.parametrize("hook", ["allreduce", "powersgd", "post_localsgd", "zero_overlap"])
def test_the_model_is_one_graph_compiled_once(own_pool, plain, hook, way):
    for graphs, operators, _, _ in own_pool.run(_train, 2, hook, way):
        assert (graphs, operators) == plain["around"][:2], "as many as without a hook"


@pytest.mark.parametrize("way", ["around", "in place", "the caller"])
@pytest.mark.parametrize("hook", ["allreduce", "zero_overlap"])
def test_compiled_weights_are_those_of_plain_ddp(own_pool, plain, hook, way):
    for _, _, final, seen in own_pool.run(_train, 2, hook, way):
        assert distance(final, plain["eager"][2]) <= 1e-5  # AdamW at 0.01, and float32's rounding: as without compile
        assert seen == pytest.approx(plain["eager"][3], abs=1e-3)


def _traced(rank, world_size):
    """With forward hooks that torch.compile traces: what it makes of them, or the error at which it ends."""
    real, CompileWatch.eager = CompileWatch.eager, lambda self, hook: hook
    try:
        return _train(rank, world_size, "powersgd", "around")[:2]
    except Exception as error:
        return type(error).__name__
    finally:
        CompileWatch.eager = real


def test_hooks_that_are_traced_would_be_noticed(own_pool, plain):
    for result in own_pool.run(_traced, 2, expendable=True):
        assert result != plain["around"][:2]


def test_a_caller_that_is_compiled_is_noticed():
    model = nn.Linear(2, 2)
    watch = CompileWatch(model)
    model.register_forward_pre_hook(watch.eager(lambda module, args: None))
    model(torch.ones(1, 2))
    assert not watch.is_compiled()
    torch.compile(lambda x: model(x), backend="eager")(torch.ones(1, 2))
    assert watch.is_compiled()

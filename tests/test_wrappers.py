"""Which wrapper is the model's, whose optimizer it is, and what copies are."""

import copy
import gc
import io
import logging
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from models import Net, distance, loss_of, make_ddp, train, weights
from test_steps import HOOKS, LOCAL, every_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from accel_commhooks import attach, install
from accel_commhooks.attachment.slot import attachment_of
from accel_commhooks.config import errors
from accel_commhooks.config.errors import CommHookError


def _wrapped_twice(rank, world_size, name):
    """A search for a batch size builds a wrapper, fails, and builds another one; both stay alive."""
    installation = install(name, **HOOKS[name]) if name is not None else None
    torch.manual_seed(0)
    model = Net()
    wrappers = [DistributedDataParallel(model, bucket_cap_mb=0.004)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(wrappers[0], rank, 3, optimizer=optimizer)
    wrappers.append(DistributedDataParallel(model, bucket_cap_mb=0.004))
    train(wrappers[1], rank, 5, optimizer=optimizer, first=3)
    if installation is None:
        return None, None, weights(model)
    older, newer = map(attachment_of, wrappers)
    steps = newer.steps
    newer.synchronize()
    installation.uninstall()
    return older is None, steps, weights(model)


@every_hook
def test_the_newest_wrapper_is_the_models(pool, name):
    by_rank = pool.run(_wrapped_twice, 2, name)
    for retired, steps, final in by_rank:
        assert retired and steps == 5
        assert distance(final, by_rank[0][2]) == 0
    if name in ("allreduce", "zero_overlap"):
        assert distance(by_rank[0][2], pool.run(_wrapped_twice, 2, None)[0][2]) <= 1e-6


def _unfreezing(rank, world_size, name, keep_old):
    """Progressive unfreezing: a wrapper for each stage, one optimizer for all of them."""
    torch.manual_seed(0)
    model = Net()
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    old, handle, step = [], None, 0
    for part in (model.second, model.first, model.norm):
        part.requires_grad_(True)
        ddp = DistributedDataParallel(model)
        if keep_old:
            old.append(ddp)
        if name is not None:
            handle = attach(ddp, name, optimizer=optimizer, **HOOKS[name])
        train(ddp, rank, 4, optimizer=optimizer, first=step)
        step += 4
        del ddp
    if handle is not None:
        handle.detach()
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    whole = all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    return shapes, whole, weights(model)


@pytest.mark.parametrize("keep_old", [True, False])
@every_hook
def test_wrapped_anew_with_the_same_optimizer(pool, name, keep_old):
    by_rank = pool.run(_unfreezing, 2, name, keep_old)
    for shapes, whole, final in by_rank:
        assert shapes == [tuple(p.shape) for p in Net().parameters()]
        assert whole
        assert distance(final, by_rank[0][2]) == 0
    if name in ("allreduce", "zero_overlap"):
        assert distance(by_rank[0][2], pool.run(_unfreezing, 2, None, keep_old)[0][2]) <= 1e-6


def _bystanders(rank, world_size, name):
    """A baseline without DDP before the training, and a small optimizer after it, as in a calibration."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_commhooks").addHandler(handler)
    errors._warned.clear()
    installation = install(name, **HOOKS[name])
    alone = nn.Linear(3, 1)
    train_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        alone(torch.ones(1, 3)).sum().backward()
        train_alone.step()
    ddp = make_ddp()
    train(ddp, rank, 4)
    attachment_of(ddp).synchronize()
    steps = attachment_of(ddp).steps
    temperature = nn.Parameter(torch.ones(()))
    calibration = torch.optim.LBFGS([temperature])

    def closure():
        calibration.zero_grad()
        loss = (temperature - 2).square()
        loss.backward()
        return loss

    calibration.step(closure)
    installation.uninstall()
    logging.getLogger("accel_commhooks").removeHandler(handler)
    return (
        steps,
        float(temperature.detach()),
        [
            r
            for r in records
            if r.startswith(f"hook '{name}' does nothing for a model that is being trained on 2 processes")
        ],
    )


@every_hook
def test_other_optimizers_may_step(pool, name):
    by_rank = pool.run(_bystanders, 2, name)
    for steps, temperature, _ in by_rank:
        assert steps == 4
        assert temperature == pytest.approx(2, abs=1e-3)
    assert len(by_rank[0][2]) == 1, "said once, because it may be a mistake"


def _copies(rank, world_size, name):
    ddp = make_ddp(device_ids=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, name, optimizer=optimizer, **HOOKS[name])
    train(ddp, rank, 3, optimizer=optimizer)
    handle.synchronize()
    twin = copy.deepcopy(ddp)
    stream = io.BytesIO()
    torch.save(ddp, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    averaged = AveragedModel(ddp)
    averaged.update_parameters(ddp)
    plain = make_ddp()
    loss_of(plain, rank, 0)
    apart = [distance(weights(ddp), weights(other)) for other in (twin, loaded, averaged.module)]
    left = [
        (len(other._forward_hooks), len(other._forward_pre_hooks), "zero_grad" in vars(other))
        for other in (twin, loaded, averaged.module, plain)
    ]
    # The original goes on with its hook, the copies train by themselves and are plain.
    train(ddp, rank, 3, optimizer=optimizer, first=3)
    steps = handle.steps
    train(twin, rank, 2)
    return apart, left, steps, handle.steps, attachment_of(twin) is None and attachment_of(loaded) is None


@every_hook
def test_copies_are_plain(pool, name):
    for apart, left, before, after, plain in pool.run(_copies, 2, name):
        assert apart == [0, 0, 0]
        assert set(left) == {(0, 0, False)}
        assert before == after == 6
        assert plain


SCRIPT = """
    import dataclasses, sys

    @dataclasses.dataclass
    class Arguments:
        rate: float = 1.0

    print([field.type(sys.argv[1]) for field in dataclasses.fields(Arguments)])
"""


def test_a_script_keeps_its_own_annotations(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "accel_commhooks", "allreduce", "train.py", "0.5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0.5]", done.stderr


def _one_optimizer_for_two_models(rank, world_size, name):
    first, second = make_ddp(Net(), seed=1), make_ddp(Net(), seed=2)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01, eps=1e-3)
    handles = [attach(ddp, name, **HOOKS[name]) for ddp in (first, second)] if name is not None else []
    for step in range(8):
        (loss_of(first, rank, step) + loss_of(second, rank, 50 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.detach()
    second_weights = {f"second.{n}": w for n, w in weights(second).items()}
    return [handle.steps for handle in handles], {**weights(first), **second_weights}


@every_hook
def test_one_optimizer_for_two_models(pool, name):
    by_rank = pool.run(_one_optimizer_for_two_models, 2, name)
    for steps, final in by_rank:
        assert steps == [8, 8]
        assert distance(final, by_rank[0][1]) == 0
    if name in ("allreduce", "zero_overlap"):
        assert distance(by_rank[0][1], pool.run(_one_optimizer_for_two_models, 2, None)[0][1]) <= 1e-6


def _garbage_optimizer(rank, world_size, name):
    """An optimizer that nobody uses any more waits for the garbage collector, on one rank only."""
    ddp = make_ddp()
    gc.disable()
    try:
        old = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        old.itself = old
        del old
        if rank == 0:
            gc.collect()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        handle = attach(ddp, name, **HOOKS[name])
        train(ddp, rank, 4, optimizer=optimizer)
        handle.detach()
    finally:
        gc.enable()
    return weights(ddp)


@every_hook
def test_an_optimizer_that_is_garbage_on_one_rank(pool, name):
    first, second = pool.run(_garbage_optimizer, 2, name)
    assert distance(first, second) == 0


def _handle_outlives_model(rank, world_size, name):
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    handle = attach(ddp, name, optimizer=optimizer, **HOOKS[name])
    train(ddp, rank, 4, optimizer=optimizer)
    model, gone = ddp.module, weakref.ref(ddp)
    del ddp
    freed = gone() is None  # at once: nothing of ours waits for the garbage collector, which runs when it likes
    handle.detach()
    whole = all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    return freed, whole, weights(model)


@every_hook
def test_a_handle_does_not_keep_its_model(pool, name):
    by_rank = pool.run(_handle_outlives_model, 2, name)
    for freed, whole, final in by_rank:
        assert freed and whole
        assert distance(final, by_rank[0][2]) == 0


def _failed_attach(rank, world_size):
    """The optimizer is refused; the script catches that and goes on with plain DDP."""
    ddp = make_ddp()
    optimizer = torch.optim.Adafactor(ddp.parameters(), lr=0.01)
    with pytest.raises(CommHookError, match="treat every element by itself"):
        attach(ddp, "zero_overlap", optimizer=optimizer)
    train(ddp, rank, 3)
    handle = attach(ddp, "post_localsgd", **LOCAL)
    train(ddp, rank, 3, first=3)
    handle.detach()
    return handle.steps, weights(ddp)


def test_after_a_failed_attach_ddp_averages_plainly(pool):
    first, second = pool.run(_failed_attach, 2)
    assert first[0] == second[0] == 3
    assert distance(first[1], second[1]) == 0

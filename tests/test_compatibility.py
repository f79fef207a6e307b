"""What cannot work is said before the first step: the rule, the value, the remedy."""

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType
from models import Net, loss_of, make_ddp, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from accel_commhooks import CommHookKwargs, CompatibilityError, attach, attachment_of, install
from accel_commhooks.config import errors


def _text(action):
    with pytest.raises(CompatibilityError) as caught:
        action()
    return caught.value.text


def test_a_plain_module_is_not_ddp():
    text = _text(lambda: attach(nn.Linear(2, 2), "allreduce"))
    assert "needs a DistributedDataParallel model, but got torch.nn.modules.linear.Linear; wrap it" in text


def _fsdp2(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    return _text(lambda: attach(fully_shard(nn.Linear(4, 4)), "powersgd"))


def test_fsdp_is_named(pool):
    assert "the model is sharded by FSDP" in pool.run(_fsdp2, 2)[0]


def _fsdp2_installed(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    installation = install("powersgd")
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    try:
        return _text(optimizer.step)
    finally:
        installation.uninstall()


def test_fsdp_under_install_stops_before_the_first_step(pool):
    assert "the optimizer holds parameters sharded by FSDP" in pool.run(_fsdp2_installed, 2)[0]


class DeepSpeedEngine(nn.Module):
    """Stands in for DeepSpeed's, which is not installed here; it is known by the name of its module."""


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def test_deepspeed_is_named():
    assert "the model is a DeepSpeed engine" in _text(lambda: attach(DeepSpeedEngine(), "powersgd"))


@pytest.mark.parametrize(
    ("variable", "strategy"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_the_launchers_choice_is_refused_early(monkeypatch, variable, strategy):
    monkeypatch.setenv(variable, "true")
    for action in (lambda: install("powersgd"), lambda: CommHookKwargs(hook="powersgd")):
        assert f"the launcher chose {strategy} ({variable}=true)" in _text(action)


def test_one_process_is_a_single_warning(caplog):
    errors._warned.clear()
    installation = install("powersgd")
    try:
        with caplog.at_level(logging.WARNING, "accel_commhooks"):
            for _ in range(2):
                model = nn.Linear(2, 2)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    finally:
        installation.uninstall()
    assert [r.message for r in caplog.records] == [
        "hook 'powersgd' does nothing in a single process; training runs without it"
    ]


def _twice(rank, world_size):
    ddp = make_ddp()
    attach(ddp, "allreduce")
    second = _text(lambda: attach(ddp, "powersgd"))
    other = make_ddp()
    other.register_comm_hook(None, default_hooks.allreduce_hook)
    taken = _text(lambda: attach(other, "powersgd"))
    return second, taken, attachment_of(other)


def test_a_second_hook_is_refused(pool):
    second, taken, nothing = pool.run(_twice, 2)[0]
    assert "hook 'allreduce' is attached to this model already; call handle.detach() first" in second
    assert "this DDP model has a communication hook already, and can have only one" in taken
    assert nothing is None


def test_accelerates_own_hook_beside_ours():
    text = _text(lambda: CommHookKwargs(hook="powersgd", comm_hook=DDPCommunicationHookType.FP16))
    assert "Accelerate's own comm_hook=fp16 was set as well; keep hook= and options= only" in text


def _both_ways(rank, world_size):
    """Accelerate's handler names a hook, and so does the launcher."""
    installation = install("powersgd")
    ddp = make_ddp()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)  # what Accelerate's handler does
    try:
        return _text(lambda: loss_of(ddp, rank, 0))
    finally:
        installation.uninstall()


def test_hooks_from_accelerate_and_from_the_launcher(pool):
    assert "not on DistributedDataParallelKwargs(comm_hook=...)" in pool.run(_both_ways, 2)[0]


def test_trainer_with_fsdp_or_deepspeed():
    from accel_commhooks.trainer import CommHookCallback

    class Arguments:
        fsdp = "full_shard"
        deepspeed = None

    text = _text(lambda: CommHookCallback("powersgd").on_init_end(Arguments(), None, None))
    assert "TrainingArguments has fsdp='full_shard'" in text


def _finds(rank, world_size):
    """An unchanged loop hands us neither the optimizer nor the scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ddp = make_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = attach(ddp, "powersgd", start_powerSGD_iter=0)
    scales = []
    ddp.module.first.weight.register_hook(lambda _: scales.append(handle.loss_scale(torch.device("cpu"))))
    scaler.scale(loss_of(ddp, rank, 0)).backward()
    scaler.step(optimizer)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    other.step()
    after = handle.loss_scale(torch.device("cpu"))
    return handle.steps, list(map(float, scales)), after, len(handle.clock.optimizers)


def test_optimizer_and_scaler_are_found(pool):
    assert pool.run(_finds, 2) == [(1, [4.0], None, 1)] * 2


def test_importing_the_package_does_not_import_transformers():
    code = "import accel_commhooks, sys; accel_commhooks.available_hooks(); print('transformers' in sys.modules)"
    for extra, expected in (("", "False"), ("import transformers; ", "True")):  # and the check can fail
        found = subprocess.run([sys.executable, "-c", extra + code], capture_output=True, text=True, timeout=120)
        assert found.stdout.strip() == expected, found.stderr


def _install_counts(rank, world_size):
    installation = install("bf16_compress")
    first, second = make_ddp(), make_ddp(Net(32))
    for ddp in (first, second):
        train(ddp, rank, 3)
    steps = [attachment_of(ddp).steps for ddp in (first, second)]
    installation.uninstall()
    third = make_ddp()
    train(third, rank, 1)
    dist.barrier()
    return steps, attachment_of(first), attachment_of(third)


def test_install_attaches_to_every_model_and_lets_go(pool):
    assert pool.run(_install_counts, 2) == [([3, 3], None, None)] * 2

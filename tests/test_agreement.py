"""Ranks that are about to do different things are told so when they attach: on all ranks, by name, within seconds."""

import dataclasses
import gc
import logging
import time
import typing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launching import BIN, SCRIPTS, free_port, run
from models import Net, loss_of, make_ddp, train
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from accel_commhooks import CommHookError, CompatibilityError, attach, available_hooks, get_hook
from accel_commhooks.attachment import agreement, fingerprint
from accel_commhooks.comm import roll_call
from accel_commhooks.upstream.live_objects import optimizers_of

SECONDS = 10
VERSION = fingerprint.__version__
HOOKS = [*available_hooks(), "torch:powerSGD_hook"]
# Another value than the default, for options whose type alone does not tell one.
OTHERS = {
    "averager": PeriodicModelAverager,
    "elementwise": ["Other"],
    "exclude": ["head.*"],
    "include": ["first.*"],
    "outer": {"name": "sgd"},
    "period_group_size": {1: 3},
    "ranks": {"first.*": 2},
    "ranks_per_node": 1,
    "state": "test_agreement:make_state",
    "state_options": {"start_powerSGD_iter": 7},
    "subgroup": "none",
    "i_know_that_replicas_diverge": False,
    "wire_dtype": "bf16",
}
NEEDED = {"noop": {"i_know_that_replicas_diverge": True}}


def make_state(process_group, **options):
    return process_group


def other_value(field, annotation):
    """A valid value that is not the default, from the option's declaration."""
    if field.name in OTHERS:
        value = OTHERS[field.name]
        return value(period=2) if field.name == "averager" else value
    choices = field.metadata["choices"]
    if choices is not None:
        return next(choice for choice in reversed(choices) if choice != field.default)
    kinds = typing.get_args(annotation) or (annotation,)
    if bool in kinds:
        return not field.default
    if int in kinds or float in kinds:
        return (field.default or 0) + 1
    raise AssertionError(f"add another value for option '{field.name}' to OTHERS")


def options_of(name):
    options = get_hook(name).Options
    hints = typing.get_type_hints(options)
    return [(field, hints[field.name]) for field in dataclasses.fields(options)]


def _differ_in_each_option(rank, world_size, name):
    told = {}
    for field, annotation in options_of(name):
        ddp = make_ddp(Net(8))
        options = dict(NEEDED.get(name, {}))
        if rank == 2:
            options[field.name] = other_value(field, annotation)
        started = time.monotonic()
        try:
            attach(ddp, name, **options)
            text = "attached"
        except CommHookError as error:
            text = error.text
        told[field.name] = text, time.monotonic() - started
    return told


@pytest.mark.parametrize("name", HOOKS)
def test_every_option_of_every_hook(pool, name):
    """Made from the option classes, so an option that is added later is covered."""
    by_rank = pool.run(_differ_in_each_option, 3, name)
    for told in by_rank:
        assert told.keys() == {field.name for field, _ in options_of(name)}
        for option, (text, seconds) in told.items():
            assert option in text, (option, text)
            if option not in NEEDED.get(name, {}):
                assert f"rank 2 has {option} " in text and ", all others " in text
            assert seconds < SECONDS


def _differ(rank, world_size, kind):
    ddp = make_ddp(Net(8), find_unused_parameters=kind == "find_unused_parameters" and rank == 2)
    options, name, optimizer = {}, "powersgd", torch.optim.SGD
    if rank == 2:
        name = {"hook": "post_localsgd"}.get(kind, name)
        optimizer = torch.optim.AdamW if kind.startswith("optimizer") else optimizer
        if kind == "frozen":
            ddp.module.first.weight.requires_grad_(False)
        if kind == "name":
            ddp.module.renamed = ddp.module.second
            del ddp.module.second
        if kind == "bad option":
            options["matrix_approximation_rank"] = 0
        if kind == "version":
            fingerprint.__version__ = "9.9"
    made = optimizer(ddp.parameters(), lr=0.1)
    try:
        attach(ddp, name, optimizer=made if kind == "optimizer given" else None, **options)
    except CommHookError as error:
        return error.text
    finally:
        fingerprint.__version__ = VERSION
    return "attached"


DIFFERENCES = {
    "hook": "rank 2 has hook post_localsgd, all others powersgd",
    "optimizer": "rank 2 has optimizer torch.optim.adamw.AdamW, all others torch.optim.sgd.SGD",
    "optimizer given": "rank 2 has optimizer torch.optim.adamw.AdamW, all others torch.optim.sgd.SGD",
    "find_unused_parameters": "rank 2 has find_unused_parameters True, all others False",
    "frozen": "first.weight [16, 8] torch.float32 frozen, all others first.weight [16, 8] torch.float32 trainable",
    "name": "renamed.weight",
    "bad option": "matrix_approximation_rank must be at least 1, but got 0",
    "version": f"rank 2 has accel_commhooks 9.9, all others {VERSION}",
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_what_else_may_differ(pool, kind):
    for text in pool.run(_differ, 3, kind):
        assert DIFFERENCES[kind] in text


def _garbage(rank, world_size):
    """An optimizer that is no longer used, and that one rank's garbage collector has not seen yet."""
    ddp = make_ddp(Net(8))
    gc.disable()
    if rank == 0:
        old = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        old.itself = old
        del old
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found = len(optimizers_of(ddp.parameters(), collect=False))
    handle = attach(ddp, "powersgd")
    gc.enable()
    train(ddp, rank, 2, optimizer=optimizer)
    return found, handle.steps


def test_garbage_is_no_difference(pool):
    assert pool.run(_garbage, 2) == [(2, 2), (1, 2)]


# A rank without a hook.


def _absent(rank, world_size, patience):
    agreement.ABSENT_SECONDS = patience
    ddp = make_ddp(Net(8))
    available_hooks()  # importing them for the first time takes a while
    dist.barrier()
    started = time.monotonic()
    try:
        if rank != 2:
            attach(ddp, "powersgd")
        else:
            time.sleep(1)  # the others have told by now that they attach a hook
        loss_of(ddp, rank, 0).backward()
    except CompatibilityError as error:
        return error.text, time.monotonic() - started
    return "trained", 0.0


def test_a_rank_without_a_hook_is_named_by_all(own_pool):
    for text, seconds in own_pool.run(_absent, 3, agreement.ABSENT_SECONDS, expendable=True):
        assert "hook 'powersgd' is attached on some ranks, but rank 2 has no hook" in text
        assert seconds < SECONDS


def _late(rank, world_size, seconds):
    """Attaches late, after a forward; nobody may take it for absent."""
    agreement.ABSENT_SECONDS, roll_call.WARN_SECONDS, roll_call.LOOKS = 8.0, 1.0, (1.1, 20.0)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_commhooks").addHandler(handler)
    ddp = make_ddp(Net(8))
    if rank == 1:
        agreement.ABSENT_SECONDS = 1.0
        time.sleep(seconds)
        loss_of(ddp, rank, 0)
    handle = attach(ddp, "powersgd")
    logging.getLogger("accel_commhooks").removeHandler(handler)
    train(ddp, rank, 2)
    return handle.steps, records


def test_a_late_rank_is_waited_for(own_pool):
    (steps, records), (late_steps, _) = own_pool.run(_late, 2, 3, expendable=True)
    assert steps == late_steps == 2
    assert records == ["waiting for rank 1 to attach a hook"]


def test_a_rank_that_does_not_have_the_package(tmp_path):
    """Another script on one rank, through a real launcher: the others do not wait for a collective that never comes."""
    result = run(
        [BIN / "torchrun", "--nproc-per-node", 3, "--master-port", free_port(), SCRIPTS / "one_without_a_hook.py"],
        tmp_path,
        timeout=90,
    )
    assert result.code != 0
    assert "hook 'powersgd' is attached on some ranks, but rank 2 has no hook" in result.output
    seconds = float(result.output.split("seconds to the error: ")[1].split()[0])
    assert seconds < SECONDS


def test_the_averaging_callback_compares_too(pool):
    for text in pool.run(_callback, 2):
        assert "rank 1 has period 5, rank 0 4" in text


def _callback(rank, world_size):
    from accel_commhooks.trainer import ModelAveragingCallback

    callback = ModelAveragingCallback(period=4 + rank)
    model = Net(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompatibilityError) as caught:
        arguments, state = SimpleNamespace(world_size=world_size), SimpleNamespace(global_step=0)
        callback.on_train_begin(arguments, state, None, model=model, optimizer=optimizer)
    return caught.value.text


def _planted(rank, world_size):
    """A comparison that sees nothing."""
    real, fingerprint.digest = fingerprint.digest, lambda own: "same"
    try:
        attach(make_ddp(Net(8)), "bf16_compress" if rank else "fp16_compress")
    finally:
        fingerprint.digest = real
    return "attached"


def test_these_tests_can_fail(own_pool):
    assert own_pool.run(_planted, 2, expendable=True) == ["attached", "attached"]

"""What the package leans on in torch, Accelerate and Transformers: these notice when it changes."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_commhooks import CommHookKwargs
from accel_commhooks.upstream import seams


def test_end_of_backward_comes_after_the_last_gradient():
    model = nn.Linear(2, 2)
    seen = []

    def end():
        seen.append(all(p.grad is not None for p in model.parameters()))

    handle = torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda _: seams.at_end_of_backward(lambda: seams.at_end_of_backward(end)), mode="any"
    )
    model(torch.ones(1, 2)).sum().backward()
    handle.remove()
    assert seen == [True]


def test_ddp_marks_what_it_ignores():
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert [seams.is_ignored_by_ddp(p) for p in model.parameters()] == [False, True]


def test_live_objects_are_found_and_wrappers_passed_over():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    assert seams.optimizers_of(model.parameters()) == [optimizer] and prepared.optimizer is optimizer
    assert accelerator in seams.live_objects(Accelerator)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.amp.GradScaler("cpu", enabled=False)
    assert scaler in seams.live_grad_scalers()
    assert all(s.is_enabled() for s in seams.live_grad_scalers())
    assert float(scaler.scale(torch.ones(()))) == 8.0


def test_accelerate_takes_our_handler_for_its_own():
    handler = CommHookKwargs(hook="powersgd", options={"alternate": True}, bucket_cap_mb=7, find_unused_parameters=True)
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).ddp_handler is handler
    assert handler.to_kwargs() == {"bucket_cap_mb": 7, "find_unused_parameters": True}
    with pytest.raises(ValueError, match="only pass one"):
        Accelerator(cpu=True, kwargs_handlers=[handler, DistributedDataParallelKwargs()])


def test_reading_a_parameter_finishes_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 1))
    finished = []
    end = seams.guard_parameters(model, lambda p: finished.append(p.shape))
    assert not finished
    model[0].weight  # noqa: B018 - reading is the point
    assert finished == [torch.Size([2, 2])]
    finished.clear()
    model[1](torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    assert torch.Size([4, 4]) in finished, "a child's weight, used without calling the child"
    finished.clear()
    list(model.parameters())
    assert len(finished) == len(list(model.parameters()))
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(m._parameters) is dict for m in duplicate.modules())
    end()
    assert all(type(m._parameters) is dict for m in model.modules())
    assert model[0].weight.requires_grad


def test_an_import_that_happens_later_is_seen():
    seen = []
    seams.after_import("wave", lambda module: seen.append(module.__name__))
    assert seen == []
    import wave  # noqa: F401

    assert seen == ["wave"]
    seams.after_import("wave", lambda module: seen.append("at once"))
    assert seen == ["wave", "at once"]


def test_trainers_start_from_a_list_of_default_callbacks():
    from transformers import TrainerCallback, trainer
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    assert trainer.DEFAULT_CALLBACKS[0] is DefaultFlowCallback

    class Ours(TrainerCallback):
        pass

    seams.add_default_trainer_callback(Ours)
    try:
        assert Ours in trainer.DEFAULT_CALLBACKS
    finally:
        trainer.DEFAULT_CALLBACKS.remove(Ours)
    last, first, other = Ours(), TrainerCallback(), TrainerCallback()
    handler = CallbackHandler([DefaultFlowCallback(), last, other], None, None, None, None)
    seams.order_callbacks(first=first, last=last)
    assert [type(c) for c in handler.callbacks[:1]] == [DefaultFlowCallback]
    assert handler.callbacks[1] is first and handler.callbacks[-1] is last and other in handler.callbacks
    seams.order_callbacks(first=first, last=last)
    assert len(handler.callbacks) == 4


def test_compiled_modules_are_recognised():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not seams.is_compiled(model)
    assert seams.is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    model.compile(backend="eager")
    assert seams.is_compiled(model)

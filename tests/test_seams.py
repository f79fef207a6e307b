"""What the package leans on in torch, Accelerate and Transformers: these notice when it changes."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accel_commhooks import CommHookKwargs
from accel_commhooks.upstream import patches, seams
from accel_commhooks.upstream.compiling import has_compiled_part
from accel_commhooks.upstream.live_objects import live_objects, optimizers_of


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


def test_a_backward_within_a_backward_has_another_number():
    numbers = []

    def note(_):
        numbers.append(seams.current_backward())

    inner = nn.Linear(2, 2)
    inner.weight.register_hook(note)
    out = checkpoint(inner, torch.ones(1, 2, requires_grad=True), use_reentrant=True)
    out.register_hook(note)
    assert seams.current_backward() == -1
    out.sum().backward()
    assert len(set(numbers)) == 2 and -1 not in numbers
    assert seams.current_backward() == -1


class Listener:
    def __init__(self):
        self.heard = []

    def before_scaler_step(self, optimizer):
        self.heard.append(("before", optimizer))

    def after_scaler_step(self, optimizer):
        self.heard.append(("after", optimizer))

    def weights_loaded(self, module):
        self.heard.append(("loaded", module))


def test_scalers_are_heard_of():
    watch, listener = patches.grad_scaler_watch(), Listener()
    watch.listeners.add(listener)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, disabled = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)
    seen = []
    model.weight.register_hook(lambda _: seen.append(watch.scaling))
    for by in (scaler, disabled):
        by.scale(model(torch.ones(1, 2)).sum()).backward()
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [scaler, None, None] and watch.scaling is None
    model.weight.grad.fill_(torch.inf)
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(before, model.weight), "skipped"
    watch.listeners.discard(listener)
    scaler.update()
    scaler.step(optimizer)
    assert listener.heard == [("before", optimizer), ("after", optimizer)]


def test_loads_are_heard_of_and_leave_no_mark():
    watch, listener = patches.load_watch(), Listener()
    model = nn.Sequential(nn.Linear(2, 2))
    pickled = pickle.dumps(model)
    watch.listeners.add(listener)
    assert pickle.dumps(model) == pickled
    model[0].load_state_dict(model[0].state_dict())
    watch.listeners.discard(listener)
    model.load_state_dict(model.state_dict())
    assert listener.heard == [("loaded", model[0])]


def test_ddp_marks_what_it_ignores():
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert [seams.is_ignored_by_ddp(p) for p in model.parameters()] == [False, True]


def test_live_objects_are_found_and_wrappers_passed_over():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    assert optimizers_of(model.parameters()) == [optimizer] and prepared.optimizer is optimizer
    assert accelerator in live_objects(Accelerator)


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
    assert not has_compiled_part(model)
    assert has_compiled_part(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    model.compile(backend="eager")
    assert has_compiled_part(model)

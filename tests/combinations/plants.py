"""Defects to plant: the oracle must find each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

from accel_commhooks.attachment.optimizers import ModelOptimizers
from accel_commhooks.attachment.step import StepClock
from accel_commhooks.hooks.local_sgd.moments import Moments
from accel_commhooks.hooks.local_sgd.replicas import Replicas
from accel_commhooks.hooks.powersgd.stages import LowRankHook


@contextlib.contextmanager
def _counting_at_the_forward() -> Iterator[None]:
    real = StepClock._after_forward

    def after_forward(clock, ddp, args, output):
        real(clock, ddp, args, output)
        clock._finish_step()

    with patch.object(StepClock, "_after_forward", after_forward):
        yield


def _first_optimizer_ends_the_step():
    return patch.object(ModelOptimizers, "all_stepped", lambda optimizers, stepped: True)


def _discarded_gradients_stay():
    return patch.object(LowRankHook, "discard", lambda hook, kept: None)


def _loaded_weights_are_not_noticed():
    return patch.object(Replicas, "weights_loaded", lambda replicas: None)


def _own_moments_are_not_restored():
    return patch.object(Moments, "load_state_dict", lambda moments, kept: None)


@contextlib.contextmanager
def _hook_before_the_closure() -> Iterator[None]:
    real = StepClock.before_step

    def before_step(clock, optimizer, args, kwargs):
        real(clock, optimizer, args[:1], {})

    with patch.object(StepClock, "before_step", before_step):
        yield


PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "steps are counted at the forward": _counting_at_the_forward,
    "the first optimizer ends the step": _first_optimizer_ends_the_step,
    "discarded gradients stay in the residual": _discarded_gradients_stay,
    "loaded weights are not noticed": _loaded_weights_are_not_noticed,
    "a rank's own moments are not restored": _own_moments_are_not_restored,
    "the hook acts before the closure": _hook_before_the_closure,
}

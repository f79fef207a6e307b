"""What a hook is predicted to cost: its own formula, applied to a model and a number of ranks."""

from __future__ import annotations

from ..comm.cost import Prediction, Problem
from ..config.config import CommHookConfig
from ..config.registry import get_hook


def predict(config: CommHookConfig, problem: Problem) -> Prediction | None:
    """The cost of a step once the hook acts, or None where it has no formula."""
    if problem.world == 1:
        return Prediction()
    return get_hook(config.name).cost(config.build_options(), problem)

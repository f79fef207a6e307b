"""A short soak passes, and finds each planted defect. The long one is ``make soak``."""

from __future__ import annotations

from collections import Counter

import pytest

from accel_commhooks import available_hooks

from .gauges import MEMORY_TOLERANCE_MB, Sample, growth, growth_attached
from .plants import PLANTS
from .variants import variants
from .worker import Settings, soak


def _problems(pool, hooks: list[str], plant: str | None = None, **settings) -> tuple[list[str], list]:
    reports = pool.run(soak, 2, Settings(variants(hooks), plant=plant, **settings))
    return [problem for report in reports for problem in report.problems], reports


def test_every_hook_that_averages_is_soaked():
    assert {hook for hook, _ in variants().values()} == set(available_hooks()) - {"noop"}


def test_a_short_soak_passes(own_pool):
    problems, reports = _problems(own_pool, ["powersgd, alternate", "post_localsgd, overlap"], steps=130, rounds=2)
    assert problems == []
    total = sum(reports[0].counts.values(), Counter())
    assert min(total[kind] for kind in ("saves", "loads", "overflows", "evaluations", "checks")) > 0
    assert len(reports[0].samples) == 2 * 2


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(own_pool, plant):
    # One long turn, in which the hook stays attached, or several short ones.
    length = {"steps": 260, "rounds": 1} if "a hook keeps" in plant else {"steps": 48, "rounds": 4}
    problems, _ = _problems(own_pool, ["powersgd, alternate"], plant, **length)
    assert any(PLANTS[plant][1] in problem for problem in problems), problems


def test_growth_is_what_exceeds_the_tolerance():
    steady = [Sample(100 + index % 2, 5, 15, 0) for index in range(8)]
    assert growth(steady) == []
    assert growth([*steady[:6], *[Sample(101 + 1.1 * MEMORY_TOLERANCE_MB, 5, 15, 0)] * 2])
    assert growth([*steady[:6], *[Sample(100, 6, 15, 0)] * 2]) == ["threads grew from 5 to 6"]
    assert growth([*steady, *steady[:3], Sample(100, 6, 15, 0)]) == [], "one sample is no growth"
    assert growth_attached([20, 24, 28, 37]) is None
    assert growth_attached([20, 24, 28, 38]) is not None

"""A few kills of each script; ``make elastic`` has twenty."""

from __future__ import annotations

import pytest

from .command import judge
from .killing import RANKS, draw_kills
from .subjects import SUBJECTS


def test_kills_are_of_all_kinds():
    kills = draw_kills(20, 0)
    assert kills == draw_kills(20, 0) != draw_kills(20, 1)
    assert {kill.rank for kill in kills} == set(range(RANKS))
    assert {kill.into_save is None for kill in kills} == {True, False}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUBJECTS)
def test_killed_and_restarted_is_undisturbed(name):
    problems, text = judge(SUBJECTS[name], 3, seed=1)
    assert not problems, f"{text}\n{problems}"

"""The covering suite: a part of it with every test run, all of it with the slow tests, and defects that it must find."""

from __future__ import annotations

import pytest

from .axes import AXES, IMPOSSIBLE, refused
from .cover import covering_cases, pairs_of, possible_pairs
from .oracle import judge
from .plants import PLANTS

SEED = 0
QUICK = 36
CASES = covering_cases(SEED)
PARTS = 8


def _check(pool, number: int) -> str:
    case = CASES[number]
    outcome, problems = judge(pool, case)
    assert not problems, f"{problems}\n{case}\nagain: make combination SEED={SEED} CASE={number}"
    return outcome


def test_every_possible_pair_is_in_some_case(capsys):
    pairs = possible_pairs()
    covered = {pair for case in CASES for pair in pairs_of(case)}
    assert covered >= pairs
    quick = {pair for case in CASES[:QUICK] for pair in pairs_of(case)}
    with capsys.disabled():
        print(
            f"\ncombinations: {len(CASES)} cases cover {len(pairs)} pairs of {sum(map(len, AXES.values()))} traits "
            f"({sum(map(refused, CASES))} are to be refused); the quick part, {QUICK} cases, covers {len(quick)}"
        )


def test_a_seed_always_gives_the_same_cases():
    assert covering_cases(SEED) == CASES
    assert covering_cases(SEED + 1) != CASES


def test_the_cover_can_fail_to_be_one():
    missing = {pair for case in CASES[1:] for pair in pairs_of(case)}
    assert not missing >= possible_pairs(), "every case is needed, or the first one covers nothing new"


def test_every_rule_excludes_something():
    for reason, conditions in IMPOSSIBLE:
        assert any(
            all(condition({a: x, b: y}) for condition in conditions)
            for a in AXES
            for b in AXES
            for x in AXES[a]
            for y in AXES[b]
            if a != b
        ), reason


@pytest.mark.parametrize("number", range(QUICK))
def test_case(pool, number):
    _check(pool, number)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(own_pool, part):
    outcomes = {number: _check(own_pool, number) for number in range(QUICK + part, len(CASES), PARTS)}
    assert set(outcomes.values()) <= {"equal", "trained", "refused"}


# Cases in which a planted defect must be seen.
SEEN_IN = {
    "steps are counted at the forward": {"hook": "powersgd", "loop": "two forwards"},
    "the first optimizer ends the step": {"hook": "local", "optimizer": "two optimizers", "precision": "float32"},
    "discarded gradients stay in the residual": {"hook": "powersgd", "loop": "discards"},
    "loaded weights are not noticed": {"hook": "local overlap", "event": "weights loaded"},
    "a rank's own moments are not restored": {"hook": "local", "event": "resume"},
    "the hook acts before the closure": {"hook": "zero", "loop": "closure"},
}
PLAIN = {
    "model": "tied",
    "ddp": "default",
    "optimizer": "sgd",
    "loop": "plain",
    "precision": "float32",
    "event": "none",
    "way": "attach",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(pool, plant):
    case = {**PLAIN, **SEEN_IN[plant]}
    assert judge(pool, case)[1] == [], "the case is fine without it"
    assert judge(pool, case, plant)[1], "nobody noticed"

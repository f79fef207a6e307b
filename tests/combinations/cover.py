"""Covering arrays: few cases in which every possible pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from .axes import AXES, Case, possible

Pair = frozenset[tuple[str, str]]


def pairs_of(case: Case) -> Iterator[Pair]:
    """The pairs of values that are in a case."""
    return map(frozenset, itertools.combinations(case.items(), 2))


def possible_pairs(axes: dict[str, list[str]] = AXES, allowed: Callable[[Case], bool] = possible) -> set[Pair]:
    """Every pair of values of two axes that some complete case has."""
    found = set()
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            case = dict(zip((one, other), pair, strict=True))
            if allowed(case) and _complete(case, axes, allowed, lambda axis, values, _: values) is not None:
                found.add(frozenset(case.items()))
    return found


def covering_cases(
    seed: int, axes: dict[str, list[str]] = AXES, allowed: Callable[[Case], bool] = possible
) -> list[Case]:
    """Cases that cover all possible pairs. The same seed gives the same cases, another one others."""
    draw = random.Random(seed)
    left = possible_pairs(axes, allowed)
    cases = []

    def best_first(axis: str, values: list[str], case: Case) -> list[str]:
        """Values that cover most new pairs with those chosen so far come first; chance decides between equals."""
        shuffled = draw.sample(values, len(values))
        return sorted(shuffled, key=lambda value: -sum(pair in left for pair in pairs_of({**case, axis: value})))

    while left:
        start = draw.choice(sorted(left, key=sorted))
        case = _complete(dict(start), axes, allowed, best_first)
        assert case is not None
        cases.append({axis: case[axis] for axis in axes})
        left.difference_update(pairs_of(case))
    return cases


def _complete(case: Case, axes: dict[str, list[str]], allowed: Callable[[Case], bool], order: Callable) -> Case | None:
    """A complete case with these values, or None where there is none."""
    missing = [axis for axis in axes if axis not in case]
    if not missing:
        return case
    for value in order(missing[0], axes[missing[0]], case):
        extended = {**case, missing[0]: value}
        if allowed(extended) and (whole := _complete(extended, axes, allowed, order)) is not None:
            return whole
    return None

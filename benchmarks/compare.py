"""Whether two runs of a measurement agree: ``python benchmarks/compare.py ONE.json OTHER.json``.

Compares the ratios to the step without communication. Two contenders that lie closer together than the tolerance have no
order of their own; all others must be in the same order in both runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from accel_commhooks.bench.report import read_result

TOLERANCE = 0.1


def ratios(path: str) -> dict[str, float]:
    entries = read_result(path)["contenders"]
    return {entry["label"]: entry["times_noop"] for entry in entries if "times_noop" in entry}


def swapped(one: dict[str, float], other: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs that are clearly apart in one run and the other way round in the other."""
    pairs = []
    for a, b in itertools.permutations(one.keys() & other.keys(), 2):
        clear = max(one[b] / one[a], other[a] / other[b]) > 1 + TOLERANCE
        if one[a] < one[b] and other[a] > other[b] and clear:
            pairs.append((a, b))
    return sorted(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("one")
    parser.add_argument("other")
    parsed = parser.parse_args()
    one, other = ratios(parsed.one), ratios(parsed.other)
    if not one.keys() & other.keys():
        print("compare: the two runs have no contender in common, or no noop to compare with", file=sys.stderr)
        return 2
    width = max(map(len, one))
    worst = 0.0
    for label in sorted(one.keys() & other.keys(), key=lambda label: one[label]):
        difference = other[label] / one[label] - 1
        worst = max(worst, abs(difference))
        print(f"{label:{width}}  {one[label]:6.2f}  {other[label]:6.2f}  {difference:+7.1%}")
    for a, b in swapped(one, other):
        print(f"{a} was faster than {b}, then slower")
    print(f"largest difference {worst:.1%}, {len(swapped(one, other))} pairs in another order")
    return int(worst > TOLERANCE or bool(swapped(one, other)))


if __name__ == "__main__":
    sys.exit(main())

"""Run one case, or all of them: ``cd tests; python -m combinations --seed 0 --case 17``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from ranks import RankError, RankPool

from .cover import covering_cases, pairs_of, possible_pairs
from .oracle import judge
from .plants import PLANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m combinations", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which covering set of cases")
    parser.add_argument("--case", type=int, help="the number of a case; all of them when left out")
    parser.add_argument("--plant", choices=PLANTS, help="plant a defect first")
    arguments = parser.parse_args()
    cases = covering_cases(arguments.seed)
    numbers = range(len(cases)) if arguments.case is None else [arguments.case]
    pool, outcomes, failed = RankPool(2), Counter(), 0
    try:
        for number in numbers:
            try:
                outcome, problems = judge(pool, cases[number], arguments.plant)
            except RankError as error:
                outcome, problems = "error", [str(error)]
            outcomes[outcome] += 1
            failed += bool(problems)
            if problems or arguments.case is not None:
                print(f"case {number}: {json.dumps(cases[number], indent=2)}\n{outcome}")
                print(*(problems or ["fine"]), sep="\n", flush=True)
    finally:
        pool.stop()
    covered = {pair for number in numbers for pair in pairs_of(cases[number])}
    print(
        f"seed {arguments.seed}: {len(numbers)} cases, {len(covered)} of {len(possible_pairs())} pairs covered; "
        f"{dict(outcomes)}; {failed} failed"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""
Damage sound files, and load, map and run what comes of it: `python -m tests.faults.files`.

Each case must end in a result, in an error of the package with a sentence, or in a crash of the
child process. A case is known by the seed and its number; `--case` tries a single one again and
prints what was damaged.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.faults.cases import case_of
from tests.faults.pool import Failure, try_cases


def describe(seed: int, failure: Failure) -> str:
    """Return a line on a failed case: how to try it again, what was damaged, how it ended."""
    case = case_of(seed, failure.number)
    return (
        f"--seed {seed} --case {failure.number}: {case.origin}: {case.damage}: {failure.kind} at "
        f"{failure.stage!r}: {failure.told}"
    )


def main() -> int:
    """Try the cases that the command line asks for; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--write", type=Path, help="write the file of --case here")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.count)
    if given.case is not None:
        numbers = range(given.case, given.case + 1)
        case = case_of(given.seed, given.case)
        print(f"{case.origin}: {case.damage}")
        if given.write:
            given.write.write_bytes(case.content)
    print(f"seed {given.seed}, cases {numbers.start} to {numbers.stop - 1}", flush=True)
    start = time.monotonic()
    report = try_cases(given.seed, numbers)
    for failure in report.failures:
        print(describe(given.seed, failure))
    outcomes = sorted(report.outcomes.items())
    told = ", ".join(f"{count:,} {name}" for name, count in outcomes)
    print(f"seed {given.seed}: {told} in {time.monotonic() - start:.0f} s")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())

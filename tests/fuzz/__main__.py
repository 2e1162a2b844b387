"""`python -m tests.fuzz [--cases N] [--seed N]`: exit code 1 on undocumented responses or calls without a 2xx."""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.campaign import Campaign, Result
from tests.stack import Stack

LEAST_SUCCESSES = 0.2


def main() -> int:
    """Start a service, fuzz it and return the exit code."""
    arguments = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    arguments.add_argument("--cases", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = arguments.parse_args()
    print(f"seed {options.seed}: make fuzz CASES={options.cases} SEED={options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="anneal-fuzz-", ignore_cleanup_errors=True) as folder:
        # Generated model and dataset names must not be looked up on the Hub.
        stack = Stack(Path(folder), allow_hub=False)
        try:
            stack.add_worker(slots=2)
            result = Campaign(stack, options.seed).run(options.cases)
        finally:
            stack.close()
    _tell(result, time.monotonic() - began)
    return 0 if _holds(result) else 1


def _holds(result: Result) -> bool:
    return not result.violations and not result.never_answered and result.share_of_successes >= LEAST_SUCCESSES


def _tell(result: Result, seconds: float) -> None:
    print(f"\n{'call':58s} {'cases':>6s} {'2xx':>6s} {'4xx':>6s}")
    for call, statuses in result.by_call.items():
        good = sum(count for status, count in statuses.items() if 200 <= status < 300)
        bad = sum(count for status, count in statuses.items() if 400 <= status < 500)
        print(f"{call:58s} {statuses.total():6d} {good:6d} {bad:6d}")
    print(
        f"\n{result.cases:,} cases in {seconds:.0f} s over {len(result.by_call)} calls, {result.sequences:,} of them "
        f"in stateful sequences: {result.share_of_successes:.0%} returned 2xx, {result.server_errors} returned 5xx, "
        f"{len(result.violations)} violations"
    )
    for call in result.never_answered:
        print(f"NEVER 2xx: {call}")
    for violation, count in Counter(result.violations).most_common(20):
        print(f"VIOLATION, {count} times: {violation}\n")


if __name__ == "__main__":
    sys.exit(main())

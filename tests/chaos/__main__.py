"""`python -m tests.chaos [--rounds 200] [--seed N]`: run a campaign; exit code 1 if a promise was broken."""

import argparse
import random
import sys

from tests.chaos.campaign import run
from tests.chaos.report import show


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Inject faults into the service and check its promises."
    )
    parser.add_argument("--rounds", type=int, default=200, help="faults to inject")
    parser.add_argument("--seed", type=int, default=None, help="replay the schedule of this seed; default: random")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel worlds, each with a part of the rounds")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}: make chaos ROUNDS={arguments.rounds} SEED={seed}", flush=True)
    result = run(seed, arguments.rounds, arguments.jobs)
    print(show(result))
    return 0 if result.held else 1


if __name__ == "__main__":
    sys.exit(main())

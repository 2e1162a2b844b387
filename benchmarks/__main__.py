"""`python -m benchmarks [C8 …]`: run benchmarks and print their figures as ratios.

Absolute times drift from machine to machine; each benchmark measures its peers side by side in one run.
"""

import argparse
import importlib
import os
import platform
import sys

BENCHMARKS = {
    "C5": "benchmarks.c5_stream",
    "C7": "benchmarks.c7_start",
    "C8": "benchmarks.c8_first_step",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help=f"out of {', '.join(BENCHMARKS)}; none means all")
    names = [name.upper() for name in parser.parse_args().names] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}")
    missed = [name for name in names if not importlib.import_module(BENCHMARKS[name]).main()]
    if missed:
        print(f"goals of docs/benchmarks.md missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

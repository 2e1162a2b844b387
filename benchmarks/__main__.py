"""`python -m benchmarks [C8 …]`: run benchmarks and print ratios.

Absolute times differ between machines, so each benchmark measures its peers in the same run.
"""

import argparse
import importlib
import sys

from benchmarks.figures import origin

BENCHMARKS = {
    "C1": "benchmarks.c1_ingest",
    "C3": "benchmarks.c3_curve",
    "C4": "benchmarks.c4_lists",
    "C5": "benchmarks.c5_stream",
    "C6": "benchmarks.c6_logs",
    "C7": "benchmarks.c7_start",
    "C8": "benchmarks.c8_first_step",
    "C9": "benchmarks.c9_tokens",
    "C10": "benchmarks.c10_step",
    "C11": "benchmarks.c11_checkpoint",
    "C12": "benchmarks.c12_dashboard",
    "C13.CLAIMS": "benchmarks.c13_claims",
    "C13.QUEUE": "benchmarks.c13_queue",
    "C14.DEVICES": "benchmarks.c14_devices",
    "C14.EVENTS": "benchmarks.c14_events",
    "C14.STREAMS": "benchmarks.c14_streams",
    "C14.WORKERS": "benchmarks.c14_workers",
    "C15": "benchmarks.c15_devices",
    "C16": "benchmarks.c16_answers",
}
"""Modules by name; the name before the dot stands for all its parts."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help=f"out of {', '.join(BENCHMARKS)}; none means all")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size, for a trial")
    arguments = parser.parse_args()
    selected = [name.upper() for name in arguments.names] or list(BENCHMARKS)
    names = [name for one in selected for name in BENCHMARKS if one in (name, name.partition(".")[0])]
    known = {part for name in BENCHMARKS for part in (name, name.partition(".")[0])}
    unknown = [one for one in selected if one not in known]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(origin(), flush=True)
    missed = [name for name in names if not _run(name, arguments.scale)]
    if missed:
        print(f"goals of docs/internals/benchmarks.md missed: {', '.join(missed)}")
    return 1 if missed else 0


def _run(name: str, scale: float) -> bool:
    reached: bool = importlib.import_module(BENCHMARKS[name]).main(scale)
    return reached


if __name__ == "__main__":
    sys.exit(main())

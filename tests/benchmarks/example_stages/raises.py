"""Stage that fails."""

from benchmarks.gpu_check.check import Check


def run(check: Check) -> None:
    raise RuntimeError("no such kernel")

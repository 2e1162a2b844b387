"""Figures that several benchmarks report."""

from collections.abc import Sequence

import psutil


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which this part of the sorted values lies."""
    return values[min(len(values) - 1, int(part * len(values)))]


def seconds_used(pid: int) -> float:
    """Return the processor seconds of a process, its children, and those of them that have ended."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total

"""Figures that several benchmarks report."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil


def origin() -> str:
    """Return the commit, the date and the machine that figures belong to, as the documentation names them."""
    commit = _git("rev-parse", "--short=8", "HEAD") + (" with changes" if _git("status", "--porcelain") else "")
    machine = f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}"
    return f"commit {commit}, {datetime.now(UTC):%Y-%m-%d}, {machine}, load {os.getloadavg()[0]:.1f}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


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

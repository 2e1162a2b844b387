"""Every benchmark runs, in small: a published figure can be had again."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.nodes import ROOT

_SMALL = {"C1": 0.1, "C5": 0.2, "C7": 0.1, "C14.WORKERS": 0.05}
"""Parts of the full size, where the usual one is too small to measure."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_to_its_end_and_prints_its_figures(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks", name, "--scale", str(_SMALL.get(name, 0.01))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stdout + done.stderr
    origin, *figures = done.stdout.splitlines()
    assert origin.startswith("commit ")
    assert any(line.startswith(name.partition(".")[0]) for line in figures), done.stdout
    if done.returncode == 1:  # in small, goals mean nothing
        assert figures[-1].startswith("goals of docs/internals/benchmarks.md missed")

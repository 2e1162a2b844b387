"""Stage that records a result, starts a program and never ends."""

import subprocess
import threading

from benchmarks.gpu_check.check import Check


def run(check: Check) -> None:
    program = subprocess.Popen(["sleep", "600"])
    check.record("before", program=program.pid)
    threading.Event().wait()

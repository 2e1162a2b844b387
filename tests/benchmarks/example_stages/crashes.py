"""Stage that crashes together with the server that it was forked from."""

import os
import signal

from benchmarks.gpu_check.check import Check


def run(check: Check) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()

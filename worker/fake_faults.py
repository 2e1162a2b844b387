"""Ways in which the `fake` trainer goes wrong when it is asked to, and what each is called."""

import ctypes
import errno
import os
import resource
import signal
from typing import Any


class Failure(Exception):
    """A failure with a stable code."""

    def __init__(self, code: str, message: str, repair: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.repair = repair


def crash(how: str) -> None:
    """End this process as the option `crash` says."""
    match how:
        case "exception":
            raise RuntimeError("this step was asked to raise")
        case "segv":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
            bytearray(1 << 33)


def classify(problem: Exception) -> str:
    """The stable code of what went wrong."""
    if isinstance(problem, Failure):
        return problem.code
    if isinstance(problem, MemoryError):
        return "out_of_memory"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "internal"

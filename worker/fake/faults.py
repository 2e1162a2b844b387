"""Simulated failures of the `fake` trainer and their error codes."""

import ctypes
import errno
import os
import resource
import signal

from anneal.contracts.attempt.messages import RepairProposal


class Failure(Exception):
    """Failure with a stable code."""

    def __init__(self, code: str, message: str, repair: RepairProposal | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.repair = repair


def crash_process(how: str) -> None:
    """End this process in the way that the option `crash` names."""
    match how:
        case "exception":
            raise RuntimeError("this step is configured to raise")
        case "segv":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
            bytearray(1 << 33)


def classify_error(problem: Exception) -> str:
    """Return the stable error code of an exception."""
    if isinstance(problem, Failure):
        return problem.code
    if isinstance(problem, MemoryError):
        return "out_of_memory"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    return "internal"

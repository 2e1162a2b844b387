"""Deadline of a training process, kept by the kernel: with the last renewal of its lease, the process ends too."""

import ctypes
import errno
import os
import signal
import time
from functools import cache

from app.infra.clock import since_boot

_ABSOLUTE = 1
"""TIMER_ABSTIME."""
_UNKNOWN_CLOCK = (errno.EINVAL, errno.EOPNOTSUPP)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def arm_deadline(until: float) -> None:
    """Make the kernel end this process at `until` (seconds since boot), even if the interpreter is blocked.

    Two timers do it, which children do not inherit: the interval timer, which every kernel has, stops while the machine
    sleeps; the other one then ends the process as soon as the machine wakes up.
    """
    signal.setitimer(signal.ITIMER_REAL, max(until - since_boot(), 0.001))
    timer = _boot_timer(os.getpid())
    if timer is None:
        return
    nanoseconds = max(int(until * 1e9), 1)  # 0 would disarm it
    spec = _TimerSpec(value=_Timespec(*divmod(nanoseconds, 1_000_000_000)))
    if _load_library().timer_settime(timer, _ABSOLUTE, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), "timer_settime")


@cache
def _boot_timer(_process: int) -> ctypes.c_void_p | None:
    """Create the timer of a process by the time since boot; None if the kernel has no such clock for timers."""
    timer = ctypes.c_void_p()
    # Without an event of its own, the timer sends SIGALRM.
    if _load_library().timer_create(time.CLOCK_BOOTTIME, None, ctypes.byref(timer)) == 0:
        return timer
    if (number := ctypes.get_errno()) in _UNKNOWN_CLOCK:
        return None
    raise OSError(number, "timer_create")


@cache
def _load_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    # Before its version 2.34, glibc has timers in a library of their own.
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)

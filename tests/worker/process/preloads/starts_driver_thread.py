"""Starts a thread that has a name as that which NVML starts when it is initialized."""

import ctypes
import threading

_PR_SET_NAME = 15


def _wait() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"cuda00001800007", 0, 0, 0)
    _is_named.set()
    threading.Event().wait()


_is_named = threading.Event()
threading.Thread(target=_wait, daemon=True).start()
_is_named.wait()

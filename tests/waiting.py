"""Polling with a deadline instead of fixed sleeps."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], timeout: float = 30.0, every: float = 0.02, what: str = "") -> T:
    """Call `probe` until it returns something truthy; fail after `timeout` seconds with its last value."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or probe}; last value: {value!r}")
        _pause(every)


async def eventually_async(
    probe: Callable[[], Awaitable[T | None]], timeout: float = 30.0, every: float = 0.02, what: str = ""
) -> T:
    """Do the same as `eventually` for a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        value = await probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or probe}; last value: {value!r}")
        await asyncio.sleep(every)


def _pause(seconds: float) -> None:
    """Yield the processor between two polls; no test relies on this duration."""
    import threading

    threading.Event().wait(seconds)

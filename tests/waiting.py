"""Polling with a deadline instead of fixed sleeps, and calls that wait for the test."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_REST = 9.0
_LEAST_PAUSE = 0.02
_MAX_PAUSE = 0.3
"""The pause between two polls is `_REST` times as long as a poll took, at most this many seconds: a test that waits
would otherwise keep the service, and so half a core, busy with its questions."""
_SHARE = 0.05
"""It is also at least this share of the time waited so far, for the same reason."""


def eventually(probe: Callable[[], T | None], timeout: float = 30.0, every: float | None = None, what: str = "") -> T:
    """Call `probe` until it returns something truthy; fail after `timeout` seconds with its last value.

    The pause between two calls is `every` seconds; without it, longer the longer the call and the wait take.
    """
    start = time.monotonic()
    while True:
        began = time.monotonic()
        value = probe()
        if value:
            return value
        if time.monotonic() - start > timeout:
            raise AssertionError(f"not within {timeout} s: {what or probe}; last value: {value!r}")
        _pause(rest(start, began) if every is None else every)


async def eventually_async(
    probe: Callable[[], Awaitable[T | None]], timeout: float = 30.0, every: float | None = None, what: str = ""
) -> T:
    """Do the same as `eventually` for a coroutine function."""
    start = time.monotonic()
    while True:
        began = time.monotonic()
        value = await probe()
        if value:
            return value
        if time.monotonic() - start > timeout:
            raise AssertionError(f"not within {timeout} s: {what or probe}; last value: {value!r}")
        await asyncio.sleep(rest(start, began) if every is None else every)


def rest(start: float, began: float, least: float = _LEAST_PAUSE) -> float:
    """Return the seconds until the next poll, at least `least`: the wait began at `start`, the last poll at `began`."""
    now = time.monotonic()
    return max(least, min(max(_REST * (now - began), _SHARE * (now - start)), _MAX_PAUSE))


def _pause(seconds: float) -> None:
    """Yield the processor between two polls; no test relies on this duration."""
    import threading

    threading.Event().wait(seconds)


class HeldCalls:
    """Calls of a function that wait in their threads: `started` is set by the first, and `go_on` lets all return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        work = getattr(module, name)

        def wait(*arguments: Any, **named: Any) -> Any:
            self.started.set()
            assert self.go_on.wait(60)
            return work(*arguments, **named)

        monkeypatch.setattr(module, name, wait)

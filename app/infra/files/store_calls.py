"""Calls of an object store from the event loop, in threads of their own, of which there are few.

A store that accepts connections and answers nothing keeps each call until its timeouts. The calls must not keep the
threads that other work of the process needs, nor the process at its end.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from itertools import count
from typing import ParamSpec, TypeVar

from app.infra.files.object_store import StoreBusy, StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class StoreCalls:
    """Runs calls of a store, at most `slots` at a time, for the coroutines of one event loop."""

    def __init__(self, slots: int, wait_seconds: float, call_seconds: float | None) -> None:
        """Let a call wait `wait_seconds` for a slot, and `call_seconds` for its result (None: no limit)."""
        self._slots = slots
        self._wait_seconds = wait_seconds
        self._call_seconds = call_seconds
        self._free = asyncio.Semaphore(slots)
        self._numbers = count()
        self._began: dict[int, float] = {}
        """Monotonic time at which each running call began."""

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread.

        Raises:
            StoreBusy: There is no free slot.
            StoreUnavailable: The store did not answer in time. The call keeps its slot until it ends.
        """
        await self._take_slot()
        loop, context, number = asyncio.get_running_loop(), copy_context(), next(self._numbers)
        result: asyncio.Future[T] = loop.create_future()
        self._began[number] = time.monotonic()

        def end_call(outcome: T | None, error: BaseException | None) -> None:
            del self._began[number]
            self._free.release()
            if not result.done():
                result.set_exception(error) if error else result.set_result(outcome)  # type: ignore[arg-type]

        def run_call() -> None:
            outcome, error = None, None
            try:
                outcome = context.run(work, *arguments, **named)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end_call, outcome, error)

        try:
            # Not a thread of a pool, for all of which the interpreter waits at its end.
            threading.Thread(target=run_call, name=f"store-{number}", daemon=True).start()
        except RuntimeError as error:
            end_call(None, error)
        try:
            async with asyncio.timeout(self._call_seconds):
                return await result
        except TimeoutError:
            if result.done() and not result.cancelled():
                raise
            raise StoreUnavailable("it does not answer", is_silent=True) from None

    async def _take_slot(self) -> None:
        try:
            # While the store is silent, requests are refused at once: they may hold connections to the database.
            async with asyncio.timeout(0 if self._is_stuck() else self._wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise StoreBusy(f"all {self._slots} connections to it are in use, because it answers slowly") from None

    def _is_stuck(self) -> bool:
        """Return True if most calls have been running for longer than others wait."""
        overdue = sum(time.monotonic() - began > self._wait_seconds for began in self._began.values())
        return self._call_seconds is not None and overdue > self._slots / 2

"""Cancellation of background tasks."""

import asyncio
from typing import Any


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task repeatedly until it is done.

    One cancellation is not enough: a library that handles its own timeout at that moment may mistake the
    cancellation for the timeout, and the task continues.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)

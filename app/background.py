"""Ending background tasks."""

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it is over.

    Once is not enough: a library that handles its own time-out at the moment of the cancellation takes the one for
    the other, and the task goes on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)

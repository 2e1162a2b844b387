"""Background tasks: their cancellation, and passes over many items, of which a bad one does not end the pass."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import DBAPIError

from app.infra.db import is_away, is_conflict, is_timeout
from app.infra.files.object_store import StoreUnavailable


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task repeatedly until it is done.

    One cancellation is not enough: a library that handles its own timeout at that moment may mistake the
    cancellation for the timeout, and the task continues.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)


@contextmanager
def skipping_errors(log: logging.Logger, what: str, *arguments: object) -> Iterator[None]:
    """Log an error of the block, which handles one of many items, and go on behind it; the next pass tries again.

    Raises an error that the next item would have too: the database is away, or nothing of the object store answers.
    """
    try:
        yield
    except (OSError, StoreUnavailable) as error:
        if isinstance(error, StoreUnavailable) and error.is_silent:
            raise
        log.warning(f"{what}, trying again later: %s", *arguments, error)
    except DBAPIError as error:
        # PostgreSQL ended this transaction alone: it waited for others, or took too long.
        if is_away(error) and not is_conflict(error) and not is_timeout(error):
            raise
        log.warning(f"{what}, trying again later: %s", *arguments, error.orig)
    except Exception as error:
        if is_away(error):
            raise
        log.exception(f"{what}, trying again later", *arguments)

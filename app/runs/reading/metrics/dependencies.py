"""Dependencies of the endpoints that read curves."""

from collections.abc import AsyncIterator

from fastapi import Request


async def curve_read_slot(request: Request) -> AsyncIterator[None]:
    """Limit concurrent reads of curves; requests wait before the session takes a connection, so that they hold none."""
    async with request.app.state.curve_reads:
        yield

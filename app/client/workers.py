"""Methods of `client.workers`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.client.api_resource import ApiResource
from app.client.sync_async import M, stream
from app.contracts.schemas.workers import WorkerRead


class Workers(ApiResource[M]):
    """Workers: the processes that execute runs."""

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[WorkerRead]:
        """Iterate over workers with their devices and current runs, newest first."""
        async with aclosing(self._items("/workers", WorkerRead, {}, limit, after)) as items:
            async for item in items:
                yield item

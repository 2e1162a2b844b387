"""Methods of `client.workers` and `client.models`: what the machines of the service run, and what they have."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.client.api_resource import ApiResource
from app.client.sync_async import M, call, stream
from app.contracts.schemas.models import ModelRead
from app.contracts.schemas.page import Page
from app.contracts.schemas.workers import WorkerRead


class Workers(ApiResource[M]):
    """Workers: the processes that execute runs."""

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[WorkerRead]:
        """Iterate over workers with their devices and current runs, newest first."""
        async with aclosing(self._items("/workers", WorkerRead, {}, limit, after)) as items:
            async for item in items:
                yield item


class Models(ApiResource[M]):
    """Base models on the server."""

    @call
    async def list(self) -> list[ModelRead]:
        """Return the base models below the models roots of the server, by name."""
        return (await self._session.get(Page[ModelRead], "/models")).data

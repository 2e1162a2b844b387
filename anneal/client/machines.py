"""Methods of `client.service`, `client.queue`, `client.workers` and `client.models`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import date

from anneal.client.api_resource import ApiResource, without_none
from anneal.client.sync_async import M, call, stream
from anneal.contracts.schemas.administration.api_keys import LinkRead
from anneal.contracts.schemas.health import Ready
from anneal.contracts.schemas.models import ModelRead
from anneal.contracts.schemas.page import Page
from anneal.contracts.schemas.runs.queue import QueueRead
from anneal.contracts.schemas.runs.usage import UsageBy, UsageRead
from anneal.contracts.schemas.workers import WorkerRead


class Service(ApiResource[M]):
    """The service itself."""

    @call
    async def ready(self) -> Ready:
        """Return the version and readiness; raises `AnnealError` `not_ready` that names what is missing."""
        return await self._session.get(Ready, f"{self._session.transport.url}/readyz")

    @call
    async def usage(
        self, *, by: UsageBy = "month", since: date | str | None = None, until: date | str | None = None
    ) -> UsageRead:
        """Return device-hours, tokens and cost by key, experiment, month, model or method.

        `since` is the first day and `until` the day after the last one, in UTC; without them it is that of twelve
        months, the present one included. Deleted runs count too.
        """
        query = {"by": by, "from": since, "to": until}
        return await self._session.get(UsageRead, "/usage", **query)

    @call
    async def sign_in_link(self) -> LinkRead:
        """Create a link that signs a browser in to the dashboard as this key, once, within ten minutes."""
        link = await self._session.post(LinkRead, "/session/links", {})
        # Behind a proxy that terminates TLS the service does not know the scheme of its address; the client does.
        token = link.url.partition("#")[2]
        return link.model_copy(update={"url": f"{self._session.transport.url}/login#{token}"})


class Queue(ApiResource[M]):
    """The queue of all runs."""

    @call
    async def get(self) -> QueueRead:
        """Return how many runs wait and train, and the pause of the queue."""
        return await self._session.get(QueueRead, "/queue")

    @call
    async def pause(self, reason: str | None = None) -> QueueRead:
        """Let no run start until the queue is resumed; runs that train go on. Needs a key with the scope `admin`."""
        return await self._session.post(QueueRead, "/queue/pause", without_none(reason=reason))

    @call
    async def resume(self) -> QueueRead:
        """Let runs start again. Needs a key with the scope `admin`."""
        return await self._session.post(QueueRead, "/queue/resume", {})


class Workers(ApiResource[M]):
    """Workers: the processes that execute runs."""

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[WorkerRead]:
        """Iterate over workers with their devices and current runs, newest first."""
        async with aclosing(self._iterate_items("/workers", WorkerRead, {}, limit, after)) as items:
            async for item in items:
                yield item


class Models(ApiResource[M]):
    """Base models on the server."""

    @call
    async def list(self) -> list[ModelRead]:
        """Return the base models below the models roots of the server, by name."""
        return (await self._session.get(Page[ModelRead], "/models")).data

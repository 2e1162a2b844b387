"""Methods of `client.webhooks`."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from anneal.client.api_resource import ApiResource, without_none
from anneal.client.sync_async import M, call, stream
from anneal.contracts.schemas.webhooks import (
    DeliveryStatus,
    DeliveryView,
    WebhookCreated,
    WebhookEventType,
    WebhookFormat,
    WebhookView,
)


class Webhooks(ApiResource[M]):
    """Webhooks: addresses to which events of runs are sent."""

    @call
    async def create(
        self,
        url: str,
        *,
        name: str | None = None,
        format: WebhookFormat | None = None,
        types: Sequence[WebhookEventType] | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> WebhookCreated:
        """Create a webhook for the ends of runs, or events of other `types`; `secret` of the result signs them.

        `filter` has conditions on the run: `experiment_id`, `tag`, `base_model`, `task` and a list `status`.
        """
        body = without_none(url=url, name=name, format=format, types=types, filter=filter)
        return await self._session.post(WebhookCreated, "/webhooks", body)

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[WebhookView]:
        """Iterate over webhooks, newest first."""
        async with aclosing(self._iterate_items("/webhooks", WebhookView, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, webhook_id: str) -> WebhookView:
        """Return a webhook; `last_error` says why its receiver fails."""
        return await self._session.get(WebhookView, f"/webhooks/{webhook_id}")

    @call
    async def update(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        name: str | None = None,
        format: WebhookFormat | None = None,
        types: Sequence[WebhookEventType] | None = None,
        filter: Mapping[str, Any] | None = None,
        enabled: bool | None = None,
    ) -> WebhookView:
        """Change a webhook; `filter` replaces the existing one, and `enabled=False` pauses it."""
        body = without_none(url=url, name=name, format=format, types=types, filter=filter, enabled=enabled)
        return await self._send_patch(WebhookView, f"/webhooks/{webhook_id}", body)

    @call
    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook with its deliveries."""
        await self._session.request("DELETE", f"/webhooks/{webhook_id}")

    @call
    async def rotate(self, webhook_id: str) -> WebhookCreated:
        """Replace the secret of a webhook; for 24 hours the previous one signs too."""
        return await self._session.post(WebhookCreated, f"/webhooks/{webhook_id}/rotate", {})

    @call
    async def test(self, webhook_id: str) -> DeliveryView:
        """Send a test message, once; `get_delivery` shows the result within 20 seconds."""
        return await self._session.post(DeliveryView, f"/webhooks/{webhook_id}/test", {})

    @stream
    async def deliveries(
        self,
        webhook_id: str,
        *,
        status: DeliveryStatus | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[DeliveryView]:
        """Iterate over the deliveries of a webhook, newest first."""
        path = f"/webhooks/{webhook_id}/deliveries"
        async with aclosing(self._iterate_items(path, DeliveryView, {"status": status}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get_delivery(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Return a delivery."""
        return await self._session.get(DeliveryView, f"/webhooks/{webhook_id}/deliveries/{delivery_id}")

    @call
    async def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        """Send a message again under its id."""
        path = f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"
        return await self._session.post(DeliveryView, path, {})

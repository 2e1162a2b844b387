"""Methods of `client.keys`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from anneal.client.api_resource import UNSET, ApiResource, Unset, without_none, without_unset
from anneal.client.sync_async import M, call, stream
from anneal.contracts.schemas.administration.api_keys import KeyCreated, KeyScope, KeyView


class Keys(ApiResource[M]):
    """API keys; every method needs a key with the scope `admin`."""

    @call
    async def create(
        self,
        name: str,
        *,
        scopes: Sequence[KeyScope] | None = None,
        expires_days: float | None = None,
        max_devices: int | None = None,
        max_device_hours: float | None = None,
    ) -> KeyCreated:
        """Create a key; `key` of the result is its value, which cannot be read again.

        `max_devices` is the number of devices that its runs may use at a time, and `max_device_hours` that of the
        device-hours of a calendar month.
        """
        limits = {"max_devices": max_devices, "max_device_hours": max_device_hours}
        body = without_none(name=name, scopes=scopes, expires_days=expires_days, **limits)
        return await self._session.post(KeyCreated, "/keys", body)

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[KeyView]:
        """Iterate over keys, newest first, including revoked and expired ones."""
        async with aclosing(self._iterate_items("/keys", KeyView, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def update(
        self,
        key_id: str,
        *,
        name: str | None = None,
        max_devices: int | Unset | None = UNSET,
        max_device_hours: float | Unset | None = UNSET,
    ) -> KeyView:
        """Change the name or the limits of a key.

        `max_devices` is the number of devices that its runs may use at a time, and `max_device_hours` that of the
        device-hours of a calendar month; None removes the limit.
        """
        limits = without_unset(max_devices=max_devices, max_device_hours=max_device_hours)
        body = without_none(name=name) | limits
        return await self._send_patch(KeyView, f"/keys/{key_id}", body)

    @call
    async def revoke(self, key_id: str) -> None:
        """Revoke a key; it is rejected within 30 seconds. Raises `AnnealError` `last_admin_key` for that one."""
        await self._session.request("DELETE", f"/keys/{key_id}")

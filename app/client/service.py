"""Methods of `client.service`."""

from app.client.api_resource import ApiResource
from app.client.sync_async import M, call
from app.contracts.schemas.health import Ready


class Service(ApiResource[M]):
    """The service itself."""

    @call
    async def ready(self) -> Ready:
        """Return the version and readiness; raises `AnnealError` `not_ready` that names what is missing."""
        return await self._session.get(Ready, f"{self._session.transport.url}/readyz")

    @call
    async def docs(self) -> bytes:
        """Return the reference of the HTTP API of this version, a page of HTML without scripts."""
        return await self._session.request("GET", f"{self._session.transport.url}/docs")

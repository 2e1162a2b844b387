"""Methods of `client.service`."""

from app.client.api_resource import ApiResource
from app.client.sync_async import M, call
from app.contracts.schemas.api_keys import LinkRead
from app.contracts.schemas.health import Ready


class Service(ApiResource[M]):
    """The service itself."""

    @call
    async def ready(self) -> Ready:
        """Return the version and readiness; raises `AnnealError` `not_ready` that names what is missing."""
        return await self._session.get(Ready, f"{self._session.transport.url}/readyz")

    @call
    async def sign_in_link(self) -> LinkRead:
        """Create a link that signs a browser in to the dashboard as this key, once, within ten minutes."""
        link = await self._session.post(LinkRead, "/session/links", {})
        # Behind a proxy that terminates TLS the service does not know the scheme of its address; the client does.
        token = link.url.partition("#")[2]
        return link.model_copy(update={"url": f"{self._session.transport.url}/login#{token}"})

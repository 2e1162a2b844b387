"""Methods of `client.models`."""

from app.client.api_resource import ApiResource
from app.client.sync_async import M, call
from app.contracts.schemas.models import ModelRead
from app.contracts.schemas.page import Page


class Models(ApiResource[M]):
    """Base models on the server."""

    @call
    async def list(self) -> list[ModelRead]:
        """Return the base models below the models roots of the server, by name."""
        return (await self._session.get(Page[ModelRead], "/models")).data

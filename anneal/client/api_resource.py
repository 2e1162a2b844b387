"""Base class and helpers of the client's resources."""

from collections.abc import AsyncGenerator, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from anneal.client.sync_async import M, Resource
from anneal.client.transport import Session, parse_response
from anneal.contracts.schemas.page import Page

T = TypeVar("T", bound=BaseModel)
MOST_OF_A_PAGE = 200


class Unset(Enum):
    """Type of the default of parameters for which None has a meaning of its own."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class ApiResource(Resource[M]):
    """Base class of one resource of the API."""

    def __init__(self, session: Session, is_async: bool) -> None:
        self._session = session
        self.is_async = is_async

    async def _iterate_items(
        self, path: str, model: type[T], filters: Mapping[str, Any], limit: int | None, after: str | None
    ) -> AsyncGenerator[T]:
        """Yield the items of a list, page by page."""
        left = limit
        while left is None or left > 0:
            size = MOST_OF_A_PAGE if left is None else min(left, MOST_OF_A_PAGE)
            of_model: type[Page[Any]] = Page[model]  # type: ignore[valid-type]
            page = await self._session.get(of_model, path, **filters, limit=size, after=after)
            for item in page.data:
                yield item
            if not page.has_more or not page.data:
                return
            left = None if left is None else left - len(page.data)
            after = page.data[-1].id

    async def _send_patch(self, model: type[T], path: str, body: Mapping[str, Any]) -> T:
        return parse_response(model, await self._session.request("PATCH", path, json=body))


def without_unset(**values: Any) -> dict[str, Any]:
    """Return the values that are set; None is a value."""
    return {name: value for name, value in values.items() if value is not UNSET}


def without_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def request_body(value: BaseModel | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return only the fields that the caller set; the service applies the defaults."""
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value

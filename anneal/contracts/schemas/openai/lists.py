"""Lists of the OpenAI-compatible API."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Listed(BaseModel):
    """Object of a list."""

    id: str


T = TypeVar("T", bound=Listed)


def _with_example(schema: dict[str, Any], page: type[BaseModel]) -> None:
    """Build the example of a list from the example of its item."""
    for item in page.__pydantic_generic_metadata__["args"]:
        extra = getattr(item, "model_config", {}).get("json_schema_extra")
        if isinstance(extra, dict) and "example" in extra:
            id = extra["example"]["id"]
            page_fields = {"has_more": False, "first_id": id, "last_id": id}
            schema["example"] = {"object": "list", "data": [extra["example"]], **page_fields}


class ListPage(BaseModel, Generic[T]):
    """One page of a list; if `has_more` is true, `?after=<last_id>` returns the next one."""

    model_config = ConfigDict(json_schema_extra=_with_example)

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = False
    first_id: str | None = Field(default=None, description="ID of the first item; null for an empty page.")
    last_id: str | None = Field(default=None, description="ID of the last item; null for an empty page.")

    @classmethod
    def from_items(cls, items: Sequence[T], *, has_more: bool = False) -> Self:
        """Return the page of these items."""
        ids = (items[0].id, items[-1].id) if items else (None, None)
        return cls(data=list(items), has_more=has_more, first_id=ids[0], last_id=ids[1])

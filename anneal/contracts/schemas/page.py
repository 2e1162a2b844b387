"""Pages of lists."""

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


def _with_example(schema: dict[str, Any], page: type[BaseModel]) -> None:
    """Build the example of a page from the example of its item."""
    for item in page.__pydantic_generic_metadata__["args"]:
        extra = getattr(item, "model_config", {}).get("json_schema_extra")
        if isinstance(extra, dict) and "example" in extra:
            schema["example"] = {"data": [extra["example"]], "has_more": False}


class Page(BaseModel, Generic[T]):
    """One page of a list; `has_more` is true if `?after=<last id>` returns another page."""

    model_config = ConfigDict(json_schema_extra=_with_example)

    data: list[T]
    has_more: bool

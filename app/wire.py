"""What every call has on the wire: pages, problems, moments. Plain pydantic, so that a client can use it too."""

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer

from app.clock import timestamp

T = TypeVar("T")

Moment = Annotated[datetime, PlainSerializer(timestamp, return_type=str, when_used="json")]
"""RFC 3339 in UTC with milliseconds."""


def _with_example(schema: dict[str, Any], page: type[BaseModel]) -> None:
    """The example of a page is a page of its item's example."""
    for item in page.__pydantic_generic_metadata__["args"]:
        extra = getattr(item, "model_config", {}).get("json_schema_extra")
        if isinstance(extra, dict) and "example" in extra:
            schema["example"] = {"data": [extra["example"]], "has_more": False}


class Page(BaseModel, Generic[T]):
    """One page; `has_more` says whether `?after=<last id>` has another."""

    model_config = ConfigDict(json_schema_extra=_with_example)

    data: list[T]
    has_more: bool


class FieldError(BaseModel):
    """One thing that is wrong, and where."""

    field: str
    code: str
    message: str


class Problem(BaseModel):
    """The body of every answer that is not a success (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "urn:anneal:problem:run_not_found",
                "title": "Not Found",
                "status": 404,
                "detail": "There is no run run_01k0q3x7…; GET /v1/runs lists the ones there are.",
                "code": "run_not_found",
                "request_id": "req_01k0q3x7v5m2n8p4r6t0w9y1z3",
            }
        }
    )

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldError] | None = None
    request_id: str

"""Wire models that all endpoints share: pages, errors, timestamps. Only pydantic, so that clients can import it."""

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer

from app.clock import timestamp

T = TypeVar("T")

Moment = Annotated[datetime, PlainSerializer(timestamp, return_type=str, when_used="json")]
"""Timestamp that serializes as RFC 3339 in UTC with milliseconds."""


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


class FieldError(BaseModel):
    """Error in one field of the request."""

    field: str
    code: str
    message: str


class Problem(BaseModel):
    """Body of every error response (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "urn:anneal:problem:run_not_found",
                "title": "Not Found",
                "status": 404,
                "detail": "There is no run run_01k0q3x7…; list the existing ones with GET /v1/runs.",
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

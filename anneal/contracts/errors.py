"""Error bodies: problem details (RFC 9457) and field errors."""

from pydantic import BaseModel, ConfigDict, Field


class FieldError(BaseModel):
    """Error in one field of the request."""

    field: str = Field(description="Name of the field, dotted within a group.", examples=["learning_rate"])
    code: str = Field(description="Stable and in snake_case.", examples=["out_of_range"])
    message: str = Field(description="What is wrong and what to do about it.")


class ProblemDetails(BaseModel):
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

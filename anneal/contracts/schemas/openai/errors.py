"""Error bodies of the OpenAI-compatible API."""

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.errors import FieldError


class OpenAIError(BaseModel):
    """Error in OpenAI's form."""

    message: str = Field(description="What is wrong and what to do about it.")
    type: str = Field(description="`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param: str | None = Field(description="Parameter that is wrong, dotted within an object; null: none.")
    code: str | None = Field(description="Stable code, as in the errors of `/v1`.")
    errors: list[FieldError] | None = Field(
        default=None, description="All errors if there are several, which OpenAI's own errors do not have."
    )


class OpenAIErrorBody(BaseModel):
    """Body of every error response of the OpenAI-compatible API."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": "There is no file file-01k0q3x7…; `GET /openai/v1/files` lists the existing ones.",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "file_not_found",
                }
            }
        }
    )

    error: OpenAIError

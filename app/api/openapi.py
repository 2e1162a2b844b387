"""Errors, keys and events in /openapi.json, described once for all endpoints."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from anneal.contracts.errors import FieldError, ProblemDetails
from anneal.contracts.events import EVENTS
from anneal.contracts.schemas.openai.errors import OpenAIErrorBody
from app.api.authorization import is_public_call
from app.api.errors import MEDIA_TYPE, is_below_openai

_ALWAYS = {
    "400": "The request could not be read.",
    "401": "No key, or one that is unknown, expired or revoked.",
    "403": "The key lacks the scope, or the request came from a page of another origin.",
    "429": "Too many wrong keys from this address, or too many open streams or downloads of this key.",
    "500": "Internal server error; the server's log has the details under `request_id`.",
    "503": "The database does not answer; try again after the time in `Retry-After`.",
}
_WITH_INPUT = {"422": "The request is invalid; `errors` lists the problems."}
_WITH_BODY = {
    "408": "The body was not received completely in time.",
    "413": "The body exceeds the size limit.",
    "415": "The body is not JSON, by its `Content-Type`.",
    "507": "The disk is full; nothing was stored.",
}
_METHODS = {"get", "put", "post", "delete", "patch", "head", "options"}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of `app`."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["FieldError"] = FieldError.model_json_schema()
        template = "#/components/schemas/{model}"
        _, events = models_json_schema([(model, "validation") for model in EVENTS.values()], ref_template=template)
        schemas |= events["$defs"]
        schemas["ProblemDetails"] = ProblemDetails.model_json_schema(ref_template=template)
        schemas["ProblemDetails"].pop("$defs", None)
        _, of_openai = models_json_schema([(OpenAIErrorBody, "serialization")], ref_template=template)
        schemas |= of_openai["$defs"]
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "session": {
                "type": "apiKey",
                "in": "cookie",
                "name": "anneal_session",
                "description": "Session of a browser, from POST /v1/session; its name ends with the port.",
            },
        }
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method in _METHODS:
                    _complete_operation(method.upper(), path, operation)
        app.openapi_schema = document
    return app.openapi_schema


def _complete_operation(method: str, path: str, operation: dict[str, Any]) -> None:
    """Add the security scheme and the error responses of `operation`."""
    responses: dict[str, Any] = operation["responses"]
    is_public = is_public_call(method, path)
    # The health check answers in every state, and takes nothing.
    described = {} if is_public and method == "GET" else _ALWAYS | _WITH_INPUT
    if not is_public:
        operation["security"] = [{"key": []}, {"session": []}]
    if "{" in path:
        described["404"] = "The resource does not exist; `detail` says where to look."
    if "requestBody" in operation:
        described |= _WITH_BODY
    responses.pop("422", None)
    if is_below_openai(path):
        described["400"] = described.pop("422")
    model, media_type = "ProblemDetails", MEDIA_TYPE
    if is_below_openai(path):
        model, media_type = "OpenAIErrorBody", "application/json"
    for status, description in described.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {media_type: {"schema": {"$ref": f"#/components/schemas/{model}"}}}

"""What /openapi.json says of errors and keys: the same for every call, so it is said once."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.auth import PUBLIC
from app.errors import MEDIA_TYPE, FieldError, Problem

_ALWAYS = {
    "400": "The request could not be read.",
    "401": "No key, or one that is unknown, expired or revoked.",
    "403": "The key lacks the scope, or the page that asked is of another origin.",
    "429": "Too many wrong keys from this address.",
    "500": "A mistake of the server; its log has the details under `request_id`.",
    "503": "The database does not answer; `Retry-After` says when to come back.",
}
_WITH_INPUT = {"422": "Something in the request is wrong; `errors` lists what."}
_WITH_BODY = {
    "408": "The body stopped in the middle.",
    "413": "The body is larger than the server takes.",
    "507": "The disk is full; nothing was kept.",
}
_METHODS = {"get", "put", "post", "delete", "patch", "head", "options"}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas["FieldError"] = FieldError.model_json_schema()
        template = "#/components/schemas/{model}"
        schemas["Problem"] = Problem.model_json_schema(ref_template=template)
        schemas["Problem"].pop("$defs", None)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method in _METHODS:
                    _complete(path, operation)
        app.openapi_schema = document
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add the key that `operation` needs and the errors that it can answer."""
    responses: dict[str, Any] = operation["responses"]
    described = {} if path in PUBLIC else dict(_ALWAYS)
    if path not in PUBLIC:
        operation["security"] = [{"key": []}]
        described |= _WITH_INPUT
    if "{" in path:
        described["404"] = "There is no such thing; `detail` says where to look."
    if "requestBody" in operation:
        described |= _WITH_BODY
    responses.pop("422", None)
    for status, description in described.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}

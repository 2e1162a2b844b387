"""Page of the HTTP API: every endpoint, from the OpenAPI document."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from app.config import Settings
from app.main import create_app
from docs.generator import markdown

_INTRO = """\
All paths need a key in `Authorization: Bearer …`, except `GET /healthz`. A running server shows the same at `/docs`, with the
fields and examples of bodies, and serves the OpenAPI document at `/openapi.json`: names of bodies such as `RunCreate` are those
of its schemas. Errors are `application/problem+json`; see [Error codes](errors.md).
Lists return the newest items first; `after` takes the id of the last item of the previous page.

"""
_ALL_ENDPOINTS = ("400", "401", "403", "408", "413", "422", "429", "500", "503", "507")


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document; no server is needed."""
    return create_app(Settings(database_url="postgresql://localhost/anneal", redis_url="redis://localhost")).openapi()


def page() -> str:
    """Return the page."""
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            groups.setdefault(operation.get("tags", ["service"])[0], []).append((method.upper(), path, operation))
    text = markdown.header("HTTP endpoints", "the OpenAPI document of `app/main.py`") + _INTRO
    for tag, operations in groups.items():
        text += f"## {tag[:1].upper()}{tag[1:]}\n\n"
        for method, path, operation in operations:
            text += f"### `{method} {path}`\n\n" + "".join(_operation(operation))
    return text.rstrip("\n") + "\n"


def _operation(operation: dict[str, Any]) -> Iterator[str]:
    if "description" in operation:
        yield markdown.escape(operation["description"]) + "\n\n"
    defs = document()["components"]["schemas"]
    yield markdown.table(("parameter", "in", "type", "meaning"), _parameters(operation, defs))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body: `{media}`, {markdown.type_text(content.get('schema', {}), defs, is_named=True)}.\n\n"
    for status, response in operation["responses"].items():
        if status < "400":
            kinds = [
                f"`{media}`, {markdown.type_text(content.get('schema', {}), defs, is_named=True)}"
                for media, content in response.get("content", {}).items()
            ]
            yield f"Response {status}: {'; '.join(kinds) or 'no body'}.\n\n"
    errors = {
        status: response["description"]
        for status, response in operation["responses"].items()
        if status >= "400" and status not in _ALL_ENDPOINTS
    }
    yield "".join(f"Error {status}: {markdown.escape(text)}\n\n" for status, text in sorted(errors.items()))


def _parameters(operation: dict[str, Any], defs: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for parameter in operation.get("parameters", ()):
        meaning = parameter.get("description") or parameter["schema"].get("description", "")
        required = ", required" if parameter.get("required") and parameter["in"] != "path" else ""
        kind = markdown.type_text(parameter["schema"], defs).removesuffix(" or null")
        yield f"`{parameter['name']}`", parameter["in"] + required, kind, markdown.escape(meaning)

"""`/docs`: the OpenAPI document as one static page without scripts and without resources of other hosts."""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin-top:2.5rem;border-bottom:1px solid #ccc}h3{margin:2rem 0 .5rem;font-size:1rem}"
    "code,pre{font:14px/1.4 ui-monospace,monospace}pre{background:#f4f4f4;padding:.7rem;overflow:auto}"
    "table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre{background:#242424}a{color:#8cf}}"
)
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; frame-ancestors 'none'"
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_METHODS = ("get", "post", "put", "patch", "delete")


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Serve the API reference: every endpoint with its parameters, responses and examples."""
    page = "".join(_render_page(request.app.openapi()))
    return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})


def _render_page(document: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1><p>{escape(document['info'].get('description', ''))}</p>"
    yield "<p>Every endpoint except <code>/healthz</code> requires <code>Authorization: Bearer &lt;key&gt;</code>. "
    yield 'Machine-readable: <a href="/openapi.json">/openapi.json</a>.</p>'
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                tags.setdefault((item[method].get("tags") or ["more"])[0], []).append((method, path, item[method]))
    for tag, operations in tags.items():
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in operations:
            yield from _render_operation(document, method, path, operation)


def _render_operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(operation.get('description', ''))}</p>"
    if parameters := operation.get("parameters"):
        yield "<table>"
        for parameter in parameters:
            about = "required. " if parameter.get("required") else ""
            notes = escape(about + parameter.get("description", ""))
            yield f"<tr><td><code>{escape(parameter['name'])}</code><td>{parameter['in']}<td>{notes}"
        yield "</table>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, {escape(kind)}:<table>"
        yield from _render_fields(document, _resolve_ref(document, content.get("schema", {})), "")
        yield "</table>"
        yield from _render_example(document, "For example:", content)
    yield "<table>"
    for status, answer in operation["responses"].items():
        yield f"<tr><td>{escape(status)}<td>{escape(answer.get('description', ''))}"
    yield "</table>"
    for status, answer in operation["responses"].items():
        for content in answer.get("content", {}).values() if status < "400" else ():
            yield from _render_example(document, f"{status}:", content)


def _render_fields(document: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield a table row for each field of an object, including fields of nested objects."""
    for name, field in schema.get("properties", {}).items():
        kind = _resolve_ref(document, field)
        notes = [kind.get("description", "")]
        if name in schema.get("required", ()):
            notes.append("Required.")
        elif "default" in field:
            notes.append(f"Default: {json.dumps(field['default'])}.")
        yield f"<tr><td><code>{escape(prefix + name)}</code><td>{escape(_type_text(document, kind))}"
        yield f"<td>{escape(' '.join(part for part in notes if part))}"
        yield from _render_fields(document, kind, f"{prefix}{name}.")


def _type_text(document: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return type and bounds of a schema as short text."""
    schema = _resolve_ref(document, schema)
    if "anyOf" in schema:
        return " or ".join(_type_text(document, one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(one) for one in schema["enum"])
    kind = str(schema.get("const", schema.get("type", "any")))
    if kind == "array":
        kind = f"list of {_type_text(document, schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS if isinstance(schema.get(name), int | float)]
    return ", ".join([kind, *bounds])


def _resolve_ref(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    named: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return {**named, **schema}


def _render_example(document: dict[str, Any], what: str, content: dict[str, Any]) -> Iterator[str]:
    example = content.get("example", _resolve_ref(document, content.get("schema", {})).get("example"))
    if example is not None:
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        yield f"<p>{escape(what)}<pre>{escape(text)}</pre>"

"""Page of the error codes, collected from the calls in `app` that create errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import anneal.contracts
import app
from docs.generator import markdown

_INTRO = """\
Every error response is `application/problem+json` (RFC 9457). `code` is stable and meant for programs; `detail` says what
to do next; `errors` lists the invalid fields. In the texts below `…` represents a value.

```json
{"type": "urn:anneal:problem:run_not_found", "title": "Not Found", "status": 404,
 "detail": "There is no run run_01k0q3x7…; list the existing ones with GET /v1/runs.",
 "code": "run_not_found", "request_id": "req_01k0q3x7v5m2n8p4r6t0w9y1z3"}
```

A failed run has an `error_code` too: see [Why a run failed](../guides/failures.md).

"""
_MOST_TEXTS = 3
_FIELD_ERRORS = {
    "FieldError": (9, 9),
    "field_error": (1, 2),
    "PydanticCustomError": (0, 1),
    "BadRow": (0, 1),
    "HubConfig": (2, 3),
    "ModelNotReadable": (0, 1),
    "record_error": (1, 2),
    "add_error": (1, 2),
    "_field_error": (1, 2),
}
"""Positions of code and message in the calls that create errors of fields and rows; both may be keywords."""

Names = list[tuple[int, str, str]]
"""Line, name and text of each assignment in a function."""


def page() -> str:
    """Return the page."""
    text = markdown.header("Error codes", "the calls in `app` that create errors") + _INTRO
    rows: dict[tuple[str, str], list[str]] = {}
    fields: dict[str, list[str]] = {}
    for tree in _modules():
        for status, code, detail in _problems(tree):
            rows.setdefault((code, status), []).append(detail)
        for code, detail in _field_errors(tree):
            fields.setdefault(code, []).append(detail)
    text += "## Codes of responses\n\n"
    text += markdown.table(
        ("code", "status", "detail"),
        ((f"`{code}`", status, _text(details)) for (code, status), details in sorted(rows.items())),
    )
    text += "## Codes of fields\n\n`code` of an entry in `errors`. Types of pydantic (`missing`, `string_type`, …) occur too.\n\n"
    text += markdown.table(
        ("code", "message"), ((f"`{code}`", _text(details)) for code, details in sorted(fields.items()))
    )
    return text.rstrip("\n") + "\n"


def _text(details: list[str]) -> str:
    """Return the first texts of one code, each on a line of its own."""
    distinct = [one for one in dict.fromkeys(details) if one and not re.fullmatch(r"\{\w+\}", one)]
    return "<br>".join(markdown.escape(one) for one in distinct[:_MOST_TEXTS])


def _modules() -> Iterator[ast.Module]:
    for root in (*app.__path__, *anneal.contracts.__path__):
        for path in sorted(Path(root).rglob("*.py")):
            yield ast.parse(path.read_text())


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, Names]]:
    """Yield every call with the texts that its function assigns to names."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [
                (node.lineno, target.id, _literal(node.value, []))
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            ]
            yield from ((node, names) for node in ast.walk(scope) if isinstance(node, ast.Call))


def _problems(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for call, names in _calls(tree):
        keywords = {one.arg: one.value for one in call.keywords if one.arg}
        match _name(call):
            case "ApiError":
                parts = [*call.args, *(keywords[key] for key in ("status", "code", "detail") if key in keywords)]
                if len(parts) >= 3 and isinstance(parts[0], ast.Constant) and isinstance(parts[1], ast.Constant):
                    yield str(parts[0].value), str(parts[1].value), _literal(parts[2], names)
            case "conflict" if call.args and isinstance(call.args[0], ast.Constant):
                yield "409", str(call.args[0].value), _literal(call.args[1], names)
            case "not_found" if call.args and isinstance(call.args[0], ast.Constant):
                kind = str(call.args[0].value)
                yield "404", f"{kind}_not_found", f"There is no {kind} …; list the existing ones with GET /v1/{kind}s."
            case "invalid":
                code = keywords.get("code")
                if isinstance(code, ast.Constant):
                    detail = keywords.get("detail") or (call.args[1] if len(call.args) > 1 else None)
                    text = _literal(detail, names) if detail else ""
                    yield "422", str(code.value), text or next((m for _, m in _nested(call, names)), "")


def _nested(call: ast.Call, names: Names) -> Iterator[tuple[str, str]]:
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and _name(node) == "FieldError":
            yield from _field_error(node, names)


def _field_errors(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for call, names in _calls(tree):
        if _name(call) in _FIELD_ERRORS:
            yield from _field_error(call, names)


def _field_error(call: ast.Call, names: Names) -> Iterator[tuple[str, str]]:
    keywords = {one.arg: one.value for one in call.keywords if one.arg}
    positions = _FIELD_ERRORS[_name(call)]
    code = keywords.get("code") or (call.args[positions[0]] if len(call.args) > positions[0] else None)
    message = keywords.get("message") or (call.args[positions[1]] if len(call.args) > positions[1] else None)
    if isinstance(code, ast.Constant) and message is not None:
        yield str(code.value), _literal(message, names)


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def _literal(node: ast.expr | None, names: Names) -> str:
    """Return the text of a string expression, with `…` for values; empty if it is none."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.JoinedStr(values=values):
            return "".join(one.value if isinstance(one, ast.Constant) else "…" for one in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _literal(left, names) + _literal(right, names)
        case ast.Name(id=name):
            before = [(line, text) for line, one, text in names if one == name and line < node.lineno]
            return max(before)[1] if before else ""
    return ""

"""Markdown of the generated pages: headers, tables, and types of JSON Schema in words."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_TYPES = {
    "string": "text",
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "object": "object",
    "null": "null",
}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def header(title: str, source: str) -> str:
    """Return the beginning of a generated page; `source` names the code that it is made from."""
    return f"# {title}\n\n<!-- Generated from {source} by `make reference`; do not edit. -->\n\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, with `|` escaped in its cells; an empty text if there are no rows."""
    lines = [[_cell(cell) for cell in row] for row in rows]
    if not lines:
        return ""
    lines = [list(columns), ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def escape(text: str) -> str:
    """Return prose with `<` and `{` escaped outside of code spans."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def reference(name: str) -> str:
    """Return the name of a component schema that `$ref` points to."""
    return name.rpartition("/")[2]


def type_text(field: dict[str, Any], defs: dict[str, Any], *, is_named: bool = False) -> str:
    """Describe the type of a field in words.

    Objects of `defs` are "object", or their names if `is_named`.
    """
    if "$ref" in field:
        name = reference(field["$ref"])
        target = defs.get(name, {})
        if "properties" in target and is_named:
            return f"`{name}`"
        return type_text(target, defs, is_named=is_named)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            return " or ".join(dict.fromkeys(type_text(one, defs, is_named=is_named) for one in field[key]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {type_text(field.get('items', {}), defs, is_named=is_named)}"
    if field.get("type") == "string" and "pattern" in field and "examples" in field:
        return f'`"{field["examples"][0]}"`'
    if "type" not in field:
        return "object" if "properties" in field else "any"
    return ", ".join([_TYPES[field["type"]], *_bounds(field)])


def default_text(field: dict[str, Any], required: bool) -> str:
    """Return the default of a field as JSON, or "required"."""
    if required:
        return "required"
    fallback: Any = {} if field.get("type") == "object" else [] if field.get("type") == "array" else None
    return f"`{json.dumps(field.get('default', fallback))}`"


def _bounds(field: dict[str, Any]) -> Iterator[str]:
    words = {key: _number(field[key]) for key in _BOUNDS if key in field}
    if words.keys() == {"minimum", "maximum"}:
        yield f"{words['minimum']} to {words['maximum']}"
    else:
        yield from (f"{_BOUNDS[key]} {number}" for key, number in words.items())


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"

r"""Rules for the patterns and the JSON Schemas of rewards.

A pattern of a few characters can take seconds to compile (`[ -\uffff]` many times after `(?i)`), so the API calls these
functions in a process of limited processor time, `app.runs.creating.validation.reward_process`.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MOST_PATTERN_CHARACTERS = 1000
_MOST_UNROLLED = 100_000

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>[0-9]{0,9})(?:,(?P<most>[0-9]{0,9}))?\}|.", re.DOTALL)
"""An escape, a character class, a repetition, or one character."""

_LITERAL_BRACE = re.compile(r"(?<!\\)\{(?!\d*,?\d*\})")

_POSIX_CLASS = re.compile(r"\[:\^?\w+:\]")

_REFERENCE = re.compile(r"#(/(\$defs|properties)/[^/]+)*")

_DRAFT = "https://json-schema.org/draft/2020-12/schema"

_TOO_LONG = "is too long, or its counted repetitions are too large; use `*` or `+` instead"


def pattern_error(pattern: str) -> str | None:
    """Return None if a pattern is valid for Python's `re` and means the same in `regex`, else the reason.

    `regex`, which matches the completions, supports time limits.
    """
    if len(pattern) > MOST_PATTERN_CHARACTERS:
        return _TOO_LONG
    if posix := _POSIX_CLASS.search(pattern):
        return f"has a class `{posix[0]}`, which Python's `re` does not support; list the characters instead"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a valid regular expression of Python's `re`: {error}"
    # A literal brace in `re`, but not in `regex`.
    if _LITERAL_BRACE.search(pattern):
        return r"has a `{` that is not a repetition; write it as `\{`"
    return _TOO_LONG if _count_nodes(pattern) > _MOST_UNROLLED else None


def _count_nodes(pattern: str) -> int:
    """Estimate the number of nodes of the pattern in `regex`, which unrolls counted repetitions.

    A few nested repetitions would exhaust the memory.
    """
    sizes, last = [0], 0
    for token in _TOKEN.finditer(pattern):
        if token[0] == "(":
            sizes.append(0)
            continue
        if token[0] == ")" and len(sizes) > 1:
            last = sizes.pop() + 1
        elif token["least"] is not None:
            times = max(1, int(token["least"] or 0), int(token["most"] or 0))
            sizes[-1] -= last
            last *= times
        else:
            last = 1
        sizes[-1] += last
    return sum(sizes)


def schema_error(schema: dict[str, Any]) -> str | None:
    """Return None if a schema can validate completions in bounded time and refers only to itself, else the reason."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        if schema.get("$schema", _DRAFT) != _DRAFT:
            return f"must be a schema of draft 2020-12: leave `$schema` out, or write {_DRAFT}"
        # Before jsonschema, which compiles every pattern.
        if long := next(
            (pattern for pattern in _schema_patterns(schema) if len(pattern) > MOST_PATTERN_CHARACTERS), None
        ):
            return f"has a pattern {long[:100]!r} that {_TOO_LONG}"
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"is not a JSON Schema, at {error.json_path}: {error.message[:200]}"
    except (RecursionError, ArithmeticError, ValueError) as error:
        return f"is not a JSON Schema: {error}"
    for keyword, value in _schema_keywords({name: value for name, value in schema.items() if name != "$schema"}):
        if keyword in ("$schema", "$id", "$dynamicRef", "unevaluatedItems", "unevaluatedProperties"):
            # These change the meaning of references; the last two run beyond the reach of any time limit.
            return f"cannot contain `{keyword}`"
        if keyword == "$ref" and isinstance(value, str) and not _is_in(schema, value):
            return f"has a `$ref` to {value[:100]!r}; it must refer to `#` or to a schema below `#/$defs/`"
    for pattern in _schema_patterns(schema):
        if reason := pattern_error(pattern):
            return f"has a pattern {pattern[:100]!r} that {reason}"
    return None


def _schema_patterns(schema: Any) -> Iterator[str]:
    """Yield every pattern of a schema, and what looks like one within `default` or `enum`."""
    for keyword, value in _schema_keywords(schema):
        if keyword == "pattern" and isinstance(value, str):
            yield value
        elif keyword == "patternProperties" and isinstance(value, dict):
            yield from value


def _is_in(schema: Any, reference: str) -> bool:
    """Return True if a reference resolves to a schema that is part of this one."""
    if _REFERENCE.fullmatch(reference) is None:
        return False
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or name not in schema:
            return False
        schema = schema[name]
    return True


def _schema_keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of every object with its value; some are names of properties, not keywords."""
    if isinstance(schema, dict):
        yield from schema.items()
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _schema_keywords(inner)

"""Strict JSON parser: finite numbers, limited depth and size, unique keys, and only text that PostgreSQL can store."""

import json
import math
import re
import threading
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 32
MAX_VALUES = 500_000
"""A value takes up to eighty times its length in memory: `[],` has three bytes."""
_LARGE_BYTES = 1024**2
_large = threading.Lock()
"""Held while a large text is parsed, which keeps all other threads waiting for up to half a second."""
_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b',[{"')
_ESCAPED_INVALID = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE = re.compile("[\ud800-\udfff]")


class BadJson(ValueError):
    """Invalid JSON: a stable code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def parse_json(raw: bytes, most_values: int = MAX_VALUES) -> Any:
    """Parse UTF-8 JSON; raises `BadJson`. More than a megabyte waits for its turn, so call it in a thread."""
    return _parse_in_turn(raw, most_values, _DECODER)


def parse_with_gaps(raw: bytes) -> tuple[Any, bool]:
    """Parse UTF-8 JSON as `parse_json` does, with null for NaN and Infinity; return True if there are any.

    Python writes them for missing and for infinite numbers, though they are not JSON.
    """
    try:
        return parse_json(raw), False
    except _NotJsonConstant:
        return _parse_in_turn(raw, MAX_VALUES, _GAPS_DECODER), True


def _parse_in_turn(raw: bytes, most_values: int, decoder: json.JSONDecoder) -> Any:
    if len(raw) <= _LARGE_BYTES:
        return _parse_limited(raw, most_values, decoder)
    with _large:
        return _parse_limited(raw, most_values, decoder)


def _parse_limited(raw: bytes, most_values: int, decoder: json.JSONDecoder) -> Any:
    if len(raw) > most_values and _has_too_many_values(raw, most_values):
        raise BadJson("too_many_values", f"more than {most_values:,} values in lists and objects; split it")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadJson("not_utf8", f"byte {error.start} is not UTF-8") from None
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise BadJson("invalid_json", f"not JSON: {error.msg} at {place}") from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("number_too_long", "a number has too many digits") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or _ESCAPED_INVALID.search(raw):
        _check_values(value)
    return value


def _has_too_many_values(raw: bytes, most: int) -> bool:
    """Return True if a text has more values or more strings than allowed; takes memory for few of them."""
    if _count_separators(raw) <= most:
        return False
    # Most of them may be in a string: without escapes, every quotation mark begins or ends one.
    structure = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    if structure.count(b'"') > 2 * most:
        return True
    return _count_separators(b"".join(structure.split(b'"')[::2])) > most


def _count_separators(raw: bytes) -> int:
    """Return the number of commas and opening brackets, which is at most one below the number of values."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _check_values(value: Any) -> None:
    """Check depth and text of all values, iteratively: deeply nested input could exhaust the stack of a recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                for key in container:
                    _check_text(key)
                container = container.values()
            elif not isinstance(container, list):
                container = (container,)
            for item in container:
                if isinstance(item, str):
                    _check_text(item)
                elif isinstance(item, dict | list):
                    below.append(item)
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    if "\0" in text:
        raise BadJson("nul_in_text", "text has a NUL character (\\u0000), which cannot be stored; remove it")
    if _SURROGATE.search(text):
        raise BadJson("lone_surrogate", "text has a lone surrogate such as \\ud800; replace it")


def _too_deep() -> BadJson:
    return BadJson("too_deep", f"nested more than {MAX_DEPTH} levels deep")


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # In one pass: a row of 16 MiB may have a million keys.
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        raise BadJson("duplicate_key", f"the key {twice[:60]!r} occurs twice")
    return members


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadJson("not_finite", f"the number {digits[:30]} is too large")
    return number


class _NotJsonConstant(BadJson):
    """NaN, Infinity or -Infinity, which JSON does not have."""


def _reject_constant(name: str) -> NoReturn:
    raise _NotJsonConstant("not_finite", f"{name} is not a JSON value; use null or a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_require_unique, parse_float=_parse_finite, parse_constant=_reject_constant
)
_GAPS_DECODER = json.JSONDecoder(
    object_pairs_hook=_require_unique, parse_float=_parse_finite, parse_constant=lambda _: None
)

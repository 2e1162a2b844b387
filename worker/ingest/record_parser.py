"""Parse and clean records of the training process."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from anneal.contracts.attempt.messages import TrainerRecord
from worker.ingest.redaction import Redactor

_MAX_DEPTH = 12

_MAX_ITEMS = 10_000

_MAX_TEXT = 64 * 1024

_MAX_NAMES = 100
_MAX_NAME = 200

_LARGEST_INT = 2**63 - 1

_ADAPTERS: Mapping[Any, TypeAdapter[Any]] = {
    record_type: TypeAdapter(record_type) for record_type in get_args(TrainerRecord)
}


def parse_record(data: bytes, redact: Redactor) -> dict[str, Any] | None:
    """Return a trainer's record, sanitized and redacted; None if it is not an object with a `type`.

    Of answers, only what PostgreSQL and JSON cannot hold is replaced.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        return None
    if record["type"] == "answers":
        # They are for the caller who has asked, and enter no log: masked or cut, they would be wrong answers.
        return {_storable_text(name): _storable_value(value) for name, value in record.items()}
    cleaned: dict[str, Any] = clean_record(record, redact)
    return cleaned


Validated = TypeVar("Validated")


def validate_record(record_type: type[Validated], record: dict[str, Any]) -> Validated:
    """Return `record` as the type that the contract declares for it.

    Raises:
        ValueError: A field is missing or has another type.
    """
    try:
        validated: Validated = _ADAPTERS[record_type].validate_python(record, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    return validated


def invalid_fields(record_type: type[Any], record: dict[str, Any]) -> set[str]:
    """Return the names of the fields that do not have the type that the contract declares."""
    try:
        _ADAPTERS[record_type].validate_python(record, strict=True)
    except ValidationError as error:
        return {str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False)}
    return set()


def clean_record(record: Any, redact: Redactor) -> Any:
    """Return `record` in a form that PostgreSQL and JSON can hold.

    Non-finite numbers become None, and the object lists the names (dotted) of the first hundred in `non_finite`. NULs
    and lone surrogates are replaced; texts, lists and nesting are bounded.
    """
    non_finite: list[str] = []
    cleaned = _Sanitizer(
        redact, non_finite, isinstance(record, dict) and record.get("truncated") is True
    ).sanitize_value(record, "", 0)
    if non_finite and isinstance(cleaned, dict):
        cleaned["non_finite"] = non_finite
    return cleaned


class _Sanitizer:
    """Sanitizer of one record; `non_finite` collects the names of non-finite numbers."""

    def __init__(self, redact: Redactor, non_finite: list[str], is_truncated: bool) -> None:
        self._redact = redact
        self._is_truncated = is_truncated
        self._non_finite = non_finite

    def sanitize_value(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            fits = -_LARGEST_INT <= value <= _LARGEST_INT
            return value if fits else self.sanitize_value(_as_float(value), name, depth)
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            if len(self._non_finite) < _MAX_NAMES:
                self._non_finite.append(name[:_MAX_NAME])
            return None
        if depth >= _MAX_DEPTH and isinstance(value, dict | list | tuple):
            return "…"
        if isinstance(value, dict):
            items = list(value.items())[:_MAX_ITEMS]
            below = f"{name}." if name else ""
            return {
                (key := self._sanitize_text(str(raw))): self.sanitize_value(item, f"{below}{key}", depth + 1)
                for raw, item in items
            }
        if isinstance(value, list | tuple):
            return [self.sanitize_value(item, f"{name}.{n}", depth + 1) for n, item in enumerate(value[:_MAX_ITEMS])]
        return self._sanitize_text(str(value))

    def _sanitize_text(self, value: str) -> str:
        is_cut = len(value) > _MAX_TEXT
        value = self._redact.cut_text(value, _MAX_TEXT)
        # The trainer itself cuts what is too long for a datagram, and marks it with the same sign and `truncated`.
        if self._is_truncated and value.endswith("…"):
            value = value[: -self._redact.longest] + "…"
        elif is_cut:
            value += "…"
        return _storable_text(value)


def _storable_value(value: Any) -> Any:
    """Return `value` with its texts as `_storable_text` returns them."""
    if isinstance(value, dict):
        return {_storable_text(name): _storable_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_storable_value(item) for item in value]
    return _storable_text(value) if isinstance(value, str) else value


def _storable_text(text: str) -> str:
    """Return `text` with NULs and lone surrogates replaced."""
    return text.replace("\0", "\ufffd").encode(errors="surrogatepass").decode(errors="replace")


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf

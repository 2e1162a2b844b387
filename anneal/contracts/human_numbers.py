"""Human-readable numbers: `"10k"`, `"1.5M"`, `"8Ki"`, `"2^15"`, `"2**15"`, `"1e4"`, `"10_000"`, `"2h"`.

They are converted before any other check, so that only plain numbers are stored and compared.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Each pattern is bounded, so that parsing is fast and numbers stay small.
_WHOLE = r"[0-9]{1,15}|[0-9]{1,3}(?:_[0-9]{3}){1,4}"
_SCALED = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:[kKmMbBtT]|[kKmMgGtT][iI]|[eE]\+?[0-9]{1,2})"
_POWER = r"[0-9]{1,4}(?:\*\*|\^)[0-9]{1,2}"
_DURATION = r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?[dhms]){1,4}"
_COUNT_PATTERN = f"^(?:{_WHOLE}|{_SCALED}|{_POWER})$"
_SECONDS_PATTERN = f"^(?:{_WHOLE}|{_SCALED}|{_POWER}|{_DURATION})$"
_SIZE = r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([kKmMgGtT])([iI]?)[bB]?"
_SIZE_PATTERN = f"^(?:{_WHOLE}|{_SIZE})$"
_FACTORS = {
    "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


class HumanNumber:
    """Annotation of a number that may also be given as text; must be the last one of its type, after the bounds."""

    def __init__(self, read: Callable[[str], int], pattern: str, examples: list[str]) -> None:
        self._read = read
        self._text = {"type": "string", "pattern": pattern, "examples": examples}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._parse_text, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), self._text]}

    def parse_number(self, value: Any) -> Any:
        """Return the value as a number if it can be parsed, else unchanged."""
        try:
            return self._parse_text(value)
        except PydanticCustomError:
            return value

    def _parse_text(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._read(value)
        # JSON does not distinguish integers from floats, and YAML parses 1e4 as a float.
        return int(value) if isinstance(value, float) and value.is_integer() else value


def read_count(text: str) -> int:
    """Parse a count; raise `PydanticCustomError` if the text is not one."""
    if not re.fullmatch(_COUNT_PATTERN, text):
        raise _parse_error(text, 'is not a count; write 10000, "10k", "1.5M", "8Ki" or "2^15"')
    base, power, exponent = text.replace("**", "^").partition("^")
    if power:
        return int(int(base) ** int(exponent))
    number = text.lower().rstrip("kmbgti")
    return _whole_number(text, Decimal(number.replace("_", "")) * _FACTORS.get(text.lower()[len(number) :], 1))


def read_seconds(text: str) -> int:
    """Parse seconds, given as a count or as `"1d"`, `"2h"`, `"1h30m"`; raise like `read_count`.

    `m` is a minute, whereas `M` is a million.
    """
    if re.fullmatch(_DURATION, text):
        return _whole_number(
            text, sum(Decimal(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[0-9.]+[dhms]", text))
        )
    if not re.fullmatch(_SECONDS_PATTERN, text):
        raise _parse_error(text, 'is not a duration; write seconds, "90s", "30m", "2h" or "1d"')
    return read_count(text)


def _whole_number(text: str, number: Decimal | int) -> int:
    if number != int(number):
        raise _parse_error(text, "is not a whole number")
    return int(number)


def _parse_error(text: str, why: str) -> PydanticCustomError:
    reason = f"cannot be parsed: {json.dumps(text[:40])} {why}"
    return PydanticCustomError("bad_count", "{reason}", {"reason": reason})


def read_bytes(text: str) -> int:
    """Parse a number of bytes, given as such or with a unit, such as `"80Gi"`, `"80GiB"` or `"80GB"`.

    Units with an `i` are powers of 1024, others of 1000; parts of a byte are dropped; raise like `read_count`.
    """
    sized = re.fullmatch(_SIZE, text)
    if sized is None:
        if not re.fullmatch(_WHOLE, text):
            raise _parse_error(text, 'is not a size; write the number, or one with a unit, such as "80Gi" or "80GB"')
        return int(text.replace("_", ""))
    number, prefix, binary = sized.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** (1 + "kmgt".index(prefix.lower())))


def read_mebibytes(text: str) -> int:
    """Parse a number of MiB, given as such or as bytes with a unit; parts of a MiB are dropped."""
    return read_bytes(text) if re.fullmatch(_WHOLE, text) else read_bytes(text) // 2**20


def human_numbers(model: type[BaseModel]) -> dict[str, HumanNumber]:
    """Return the human number that each field of a model accepts, by its name."""
    return {
        name: number
        for name, field in model.model_fields.items()
        if (number := _human_number(*field.metadata, field.annotation)) is not None
    }


def _human_number(*annotations: Any) -> HumanNumber | None:
    """Return the first human number among annotations and, for unions, those of their members."""
    for annotation in annotations:
        if isinstance(annotation, HumanNumber):
            return annotation
        if (inner := _human_number(*get_args(annotation))) is not None:
            return inner
    return None


COUNT = HumanNumber(read_count, _COUNT_PATTERN, ["1k", "1.5M", "8Ki", "2^15"])
BYTES = HumanNumber(read_bytes, _SIZE_PATTERN, ["80Gi", "80GB", "512Mi"])
MEBIBYTES = HumanNumber(read_mebibytes, _SIZE_PATTERN, ["80Gi", "80GB", "512Mi"])
SECONDS = HumanNumber(read_seconds, _SECONDS_PATTERN, ["2h", "30m", "1d"])

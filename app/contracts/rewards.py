"""Rewards of method `rlhf`: their types, parameters and bounds.

Pure pydantic, no torch: the API validates with it; `worker/training/methods/rewards.py` computes the rewards.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from app.contracts.field_types import ModelName, PluginName, Strict

_MOST_CHARACTERS = 1000

_MOST_UNROLLED = 100_000

_MOST_SCHEMA_CHARACTERS = 20_000

_MOST_BYTES = 64 * 1024
"""Limit for all rewards together: half of a trainer's largest record, which must contain the configuration."""

_LONG = ("schema", "pattern", "extract", "sections", "model", "name", "options")
"""Fields of a reward with unlimited length, which are the same after defaults are filled in."""

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>[0-9]{0,9})(?:,(?P<most>[0-9]{0,9}))?\}|.", re.DOTALL)
"""An escape, a character class, a repetition, or one character."""

_LITERAL_BRACE = re.compile(r"(?<!\\)\{(?!\d*,?\d*\})")

_POSIX_CLASS = re.compile(r"\[:\^?\w+:\]")

_REFERENCE = re.compile(r"#(/(\$defs|properties)/[^/]+)*")

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _checked_pattern(pattern: str) -> str:
    """Return the pattern if it is valid for Python's `re` and means the same in `regex`, which supports timeouts."""
    if reason := _wrong_with(pattern):
        raise PydanticCustomError("bad_pattern", "{reason}", {"reason": reason})
    return pattern


def _wrong_with(pattern: str) -> str | None:
    if posix := _POSIX_CLASS.search(pattern):
        return f"has a class `{posix[0]}`, which Python's `re` does not support; list the characters instead"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a valid regular expression of Python's `re`: {error}"
    # A literal brace in `re`, but not in `regex`.
    if _LITERAL_BRACE.search(pattern):
        return r"has a `{` that is not a repetition; write it as `\{`"
    if len(pattern) > _MOST_CHARACTERS or _unrolled(pattern) > _MOST_UNROLLED:
        return "is too long, or its counted repetitions are too large; use `*` or `+` instead"
    return None


def _unrolled(pattern: str) -> int:
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


Pattern = Annotated[str, StringConstraints(min_length=1, max_length=_MOST_CHARACTERS), AfterValidator(_checked_pattern)]


class _Weighted(Strict):
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Weight in the sum of all rewards.")


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema if it can validate completions in bounded time and without external references."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError) as error:
        reason: str | None = f"is not a JSON Schema: {error}"
    else:
        too_long = f"is too long: a schema has at most {_MOST_SCHEMA_CHARACTERS:,} characters"
        reason = too_long if len(text) > _MOST_SCHEMA_CHARACTERS else _wrong_with_schema(text)
    if reason:
        raise PydanticCustomError("bad_schema", "{reason}", {"reason": reason})
    return schema


# A configuration is validated several times, and a long schema takes some tenths of a second.
@lru_cache(maxsize=64)
def _wrong_with_schema(text: str) -> str | None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        schema = json.loads(text)
        if schema.get("$schema", _DRAFT) != _DRAFT:
            return f"must be a schema of draft 2020-12: leave `$schema` out, or write {_DRAFT}"
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"is not a JSON Schema, at {error.json_path}: {error.message[:200]}"
    except (RecursionError, ArithmeticError, ValueError) as error:
        return f"is not a JSON Schema: {error}"
    for keyword, value in _keywords({name: value for name, value in schema.items() if name != "$schema"}):
        if keyword in ("$schema", "$id", "$dynamicRef", "unevaluatedItems", "unevaluatedProperties"):
            # These change the meaning of references; the last two run beyond the reach of any time limit.
            return f"cannot contain `{keyword}`"
        if keyword == "$ref" and isinstance(value, str) and not _is_in(schema, value):
            return f"has a `$ref` to {value[:100]!r}; it must refer to `#` or to a schema below `#/$defs/`"
        # Within `default` or `enum` these words may mean anything.
        properties = value if isinstance(value, dict) else ()
        patterns = {"pattern": [value], "patternProperties": properties}.get(keyword, ())
        for pattern in patterns:
            if isinstance(pattern, str) and (reason := _wrong_with(pattern)):
                return f"has a pattern {pattern[:100]!r} that {reason}"
    return None


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


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of every object with its value; some are names of properties, not keywords."""
    if isinstance(schema, dict):
        yield from schema.items()
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _keywords(inner)


class ExactMatchReward(_Weighted):
    """1 if the completion equals the row's `answer`, else 0."""

    type: Literal["exact_match"]
    ignore_case: bool = Field(default=False, description="Ignore case: `Yes` equals `yes`.")
    strip: bool = Field(default=True, description="Strip surrounding whitespace from both.")
    extract: Pattern | None = Field(
        default=None,
        description="Regular expression that extracts the text to compare: the first group of its last match, or the "
        "whole match; 0 without a match. `null` compares the whole completion.",
    )


class NumericMatchReward(_Weighted):
    """1 if the number in the completion equals that of the row's `answer`, else 0."""

    type: Literal["numeric_match"]
    relative_tolerance: float = Field(default=1e-6, ge=0, lt=1, description="Relative to the larger of both numbers.")
    absolute_tolerance: float = Field(default=1e-6, ge=0, le=1e12, description="Absolute; the wider tolerance applies.")
    extract: Pattern | None = Field(
        default=None,
        description="Regular expression that extracts the number, as in `exact_match`; `null`: the last number.",
    )


class RegexReward(_Weighted):
    """1 if the completion matches, else 0."""

    type: Literal["regex"]
    pattern: Pattern = Field(
        description="Regular expression of Python's `re`; matching times out after a second, with 0."
    )
    mode: Literal["search", "fullmatch"] = Field(
        default="search", description="Match anywhere, or the whole completion."
    )


class JsonSchemaReward(_Weighted):
    """1 if the completion, or its last ```json block, is JSON that conforms to the schema, else 0."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    # The underscore avoids the name of a method of pydantic.
    schema_: Annotated[dict[str, Any], AfterValidator(_checked_schema)] = Field(
        alias="schema", description="JSON Schema of draft 2020-12; `$ref` only within itself, `format` is not checked."
    )


class LengthReward(_Weighted):
    """1 if the completion's length is within bounds, falling linearly to 0 outside of them."""

    type: Literal["length"]
    min: int = Field(default=0, ge=0, le=10_000_000, description="Minimum length for a reward of 1.")
    max: int | None = Field(
        default=None, ge=0, le=10_000_000, description="Maximum length for a reward of 1; `null`: no maximum."
    )
    unit: Literal["tokens", "characters", "words"] = Field(
        default="tokens", description="Unit of length; special tokens are not counted."
    )
    slack: int = Field(
        default=0, ge=0, le=10_000_000, description="Distance from the bounds at which the reward reaches 0."
    )

    @model_validator(mode="after")
    def _bounds_something(self) -> "LengthReward":
        if self.min == 0 and self.max is None:
            raise PydanticCustomError("bad_bounds", "needs `min` or `max`")
        if self.max is not None and self.min > self.max:
            raise PydanticCustomError("bad_bounds", "has a `min` above its `max`")
        return self


class FormatReward(_Weighted):
    """1 if each section appears once, opened and closed, in this order, else 0."""

    type: Literal["format"]
    sections: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=50)]] = Field(
        min_length=1, max_length=20, description="Names of tags: `think` means `<think>…</think>`."
    )

    @model_validator(mode="after")
    def _each_once(self) -> "FormatReward":
        if len(set(self.sections)) < len(self.sections):
            raise PydanticCustomError("bad_bounds", "names a section twice")
        return self


class ModelReward(_Weighted):
    """Score of a reward model for prompt and completion."""

    type: Literal["model"]
    model: ModelName = Field(
        description="`run_…` of a finished run of method `reward`, a folder below the models root, or a hub name."
    )


class PluginReward(_Weighted):
    """Result of a function that the operator has installed on the workers (docs/guides/plugins.md)."""

    type: Literal["plugin"]
    name: PluginName = Field(description="Name of the entry point.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options passed to the plugin.")


Reward = Annotated[
    ExactMatchReward
    | NumericMatchReward
    | RegexReward
    | JsonSchemaReward
    | LengthReward
    | FormatReward
    | ModelReward
    | PluginReward,
    Field(discriminator="type"),
]
"""One term of the weighted sum."""


def _not_too_long(rewards: Any) -> Any:
    """Return the rewards unchanged, if they are short enough to be validated one by one."""
    listed = rewards if isinstance(rewards, list) else []
    long = [one[name] for one in listed if isinstance(one, dict) for name in _LONG if one.get(name) is not None]
    try:
        is_too_long = sum(len(json.dumps(value)) for value in long) > _MOST_BYTES
    except RecursionError:
        is_too_long = True
    except (TypeError, ValueError):  # not JSON, which is reported for the field itself
        return rewards
    if is_too_long:
        message = (
            "are too long: schemas, patterns and names of all rewards may have at most {most} bytes of JSON in total"
        )
        raise PydanticCustomError("out_of_range", message, {"most": f"{_MOST_BYTES:,}"})
    return rewards


Rewards = Annotated[list[Reward], Field(max_length=20), BeforeValidator(_not_too_long)]
"""All rewards of a run."""

WITH_ANSWER = ("exact_match", "numeric_match")
"""Types of rewards that compare a completion with the `answer` of its row."""


def names(rewards: Sequence[Reward]) -> list[str]:
    """Return the names of the rewards in metrics, in order: the type, for the second of a type `regex_2` and so on.

    Plugins have their name after the type.
    """
    seen: Counter[str] = Counter()
    found = []
    for reward in rewards:
        name = f"plugin_{reward.name}" if isinstance(reward, PluginReward) else reward.type
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def needs_answer(rewards: Sequence[Reward]) -> bool:
    """Return True if every row of the data must have an `answer`."""
    return any(reward.type in WITH_ANSWER for reward in rewards)

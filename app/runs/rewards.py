"""What a completion is rewarded for in method `rlhf`: types of rewards, their parameters and bounds.

Pure pydantic, no torch: the API checks with it; `worker/training/rewards.py` computes what it describes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from app.runs.plugins import PluginName

_MOST_CHARACTERS = 1000
_MOST_UNROLLED = 100_000
_MOST_SCHEMA_CHARACTERS = 20_000
_MOST_BYTES = 64 * 1024
"""Of all rewards together: half of what a trainer can tell in one record, where its configuration has to fit in."""
_LONG = ("schema", "pattern", "extract", "sections", "model", "name", "options")
"""What of a reward is as long as the user likes, and the same with all defaults written out."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>[0-9]{0,9})(?:,(?P<most>[0-9]{0,9}))?\}|.", re.DOTALL)
"""An escape, a class, a repetition, or one character."""
_LITERAL_BRACE = re.compile(r"(?<!\\)\{(?!\d*,?\d*\})")
_POSIX_CLASS = re.compile(r"\[:\^?\w+:\]")
_REFERENCE = re.compile(r"#(/(\$defs|properties)/[^/]+)*")
_DRAFT = "https://json-schema.org/draft/2020-12/schema"

ModelName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=300,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.@=+-]*)*$",
    ),
]
"""A folder below the models root, a hub name, or the id of a run."""


class Strict(BaseModel):
    """No unknown field, no `"1"` for 1, no true for 1, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _checked_pattern(pattern: str) -> str:
    """The pattern, if it is one of Python's `re` and means the same to the `regex` package, which can be timed out."""
    if reason := _wrong_with(pattern):
        raise PydanticCustomError("bad_pattern", "{reason}", {"reason": reason})
    return pattern


def _wrong_with(pattern: str) -> str | None:
    if posix := _POSIX_CLASS.search(pattern):
        return f"has a class `{posix[0]}`, which Python's `re` does not know; write the characters out"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression of Python's `re`: {error}"
    # A letter to the one engine, and more than that to the other.
    if _LITERAL_BRACE.search(pattern):
        return r"has a `{` that repeats nothing; write it as `\{`"
    if len(pattern) > _MOST_CHARACTERS or _unrolled(pattern) > _MOST_UNROLLED:
        return "is too long, or repeats too much by numbers in braces; use `*` or `+` in their place"
    return None


def _unrolled(pattern: str) -> int:
    """About how many nodes it becomes in the engine with a time limit, which unrolls what is repeated so many times.

    A few nested repetitions would take all memory.
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
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Factor in the sum of all rewards.")


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, if completions can be judged by it without reading anything else and in bounded time."""
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


# A configuration is validated several times on its way, and a long schema takes some tenths of a second.
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
            # These move what a reference means; the last two do what no time limit reaches.
            return f"cannot hold `{keyword}`"
        if keyword == "$ref" and isinstance(value, str) and not _is_in(schema, value):
            return f"has a `$ref` to {value[:100]!r}; it can be to `#` or to what there is below `#/$defs/`"
        # Behind `default` or `enum` these words may stand for anything.
        properties = value if isinstance(value, dict) else ()
        patterns = {"pattern": [value], "patternProperties": properties}.get(keyword, ())
        for pattern in patterns:
            if isinstance(pattern, str) and (reason := _wrong_with(pattern)):
                return f"has a pattern {pattern[:100]!r} that {reason}"
    return None


def _is_in(schema: Any, reference: str) -> bool:
    """Whether a reference leads to a schema that is part of this one."""
    if _REFERENCE.fullmatch(reference) is None:
        return False
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or name not in schema:
            return False
        schema = schema[name]
    return True


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object, with its value; some are names of properties and no keywords."""
    if isinstance(schema, dict):
        yield from schema.items()
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _keywords(inner)


class ExactMatchReward(_Weighted):
    """1 where the completion is the row's `answer`, else 0."""

    type: Literal["exact_match"]
    ignore_case: bool = Field(default=False, description="Whether `Yes` equals `yes`.")
    strip: bool = Field(default=True, description="Whether white space around both is left out.")
    extract: Pattern | None = Field(
        default=None,
        description="Pattern of what counts in the completion: the first group of its last match, or all of it; "
        "without a match it is 0. None: all of the completion.",
    )


class NumericMatchReward(_Weighted):
    """1 where the number in the completion is that of the row's `answer`, else 0."""

    type: Literal["numeric_match"]
    relative_tolerance: float = Field(default=1e-6, ge=0, lt=1, description="As a part of the larger of both.")
    absolute_tolerance: float = Field(default=1e-6, ge=0, le=1e12, description="As a number; the wider one counts.")
    extract: Pattern | None = Field(
        default=None, description="Pattern of where the number is, as in `exact_match`; None: the last number."
    )


class RegexReward(_Weighted):
    """1 where the completion matches, else 0."""

    type: Literal["regex"]
    pattern: Pattern = Field(description="A pattern of Python's `re`; matching ends after a second, with 0.")
    mode: Literal["search", "fullmatch"] = Field(default="search", description="Anywhere, or the whole completion.")


class JsonSchemaReward(_Weighted):
    """1 where the completion, or its last ```json block, is JSON and valid, else 0."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    # Named apart from a method of pydantic's own.
    schema_: Annotated[dict[str, Any], AfterValidator(_checked_schema)] = Field(
        alias="schema", description="JSON Schema of draft 2020-12; `$ref` within itself only, `format` is no check."
    )


class LengthReward(_Weighted):
    """1 where the completion's length is within bounds, falling to 0 outside of them."""

    type: Literal["length"]
    min: int = Field(default=0, ge=0, le=10_000_000, description="Least length that gets 1.")
    max: int | None = Field(default=None, ge=0, le=10_000_000, description="Greatest length that gets 1; None: any.")
    unit: Literal["tokens", "characters", "words"] = Field(
        default="tokens", description="What is counted; special tokens are not."
    )
    slack: int = Field(default=0, ge=0, le=10_000_000, description="How far outside the reward has fallen to 0.")

    @model_validator(mode="after")
    def _bounds_something(self) -> "LengthReward":
        if self.min == 0 and self.max is None:
            raise PydanticCustomError("bad_bounds", "needs `min` or `max`")
        if self.max is not None and self.min > self.max:
            raise PydanticCustomError("bad_bounds", "has a `min` above its `max`")
        return self


class FormatReward(_Weighted):
    """1 where each section is there once, opened and closed, in this order, else 0."""

    type: Literal["format"]
    sections: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=50)]] = Field(
        min_length=1, max_length=20, description="Names of tags: `think` stands for `<think>…</think>`."
    )

    @model_validator(mode="after")
    def _each_once(self) -> "FormatReward":
        if len(set(self.sections)) < len(self.sections):
            raise PydanticCustomError("bad_bounds", "names a section twice")
        return self


class ModelReward(_Weighted):
    """The score that a reward model gives to prompt and completion."""

    type: Literal["model"]
    model: ModelName = Field(
        description="`run_…` of a finished run of method `reward`, a folder below the models root, or a hub name."
    )


class PluginReward(_Weighted):
    """What a function gives that the operator has installed on the workers (docs/plugins.md)."""

    type: Literal["plugin"]
    name: PluginName = Field(description="Name of the entry point.")
    options: dict[str, Any] = Field(default_factory=dict, description="What it is made from.")


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
"""One term of the reward."""


def _not_too_long(rewards: Any) -> Any:
    """The rewards as they came, if they are short enough to be looked at one by one."""
    listed = rewards if isinstance(rewards, list) else []
    long = [one[name] for one in listed if isinstance(one, dict) for name in _LONG if one.get(name) is not None]
    try:
        is_too_long = sum(len(json.dumps(value)) for value in long) > _MOST_BYTES
    except RecursionError:
        is_too_long = True
    except (TypeError, ValueError):  # no JSON, which is said of its place
        return rewards
    if is_too_long:
        message = "are too long: schemas, patterns and names of all rewards have at most {most} bytes of JSON together"
        raise PydanticCustomError("out_of_range", message, {"most": f"{_MOST_BYTES:,}"})
    return rewards


Rewards = Annotated[list[Reward], Field(max_length=20), BeforeValidator(_not_too_long)]
"""All terms of the reward."""
WITH_ANSWER = ("exact_match", "numeric_match")
"""Types of rewards that hold a completion against the `answer` of its row."""


def names(rewards: Sequence[Reward]) -> list[str]:
    """What the rewards are called in metrics, in their order: the type, the second of a type `regex_2` and so on.

    Plugins have their name behind the type.
    """
    seen: Counter[str] = Counter()
    found = []
    for reward in rewards:
        name = f"plugin_{reward.name}" if isinstance(reward, PluginReward) else reward.type
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def needs_answer(rewards: Sequence[Reward]) -> bool:
    """Whether every row of the data must have an `answer`."""
    return any(reward.type in WITH_ANSWER for reward in rewards)

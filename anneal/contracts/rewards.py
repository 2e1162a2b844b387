"""Rewards of method `rlhf`: their types, parameters and bounds.

Pure pydantic, no torch: the API validates with it; `worker/training/methods/rewards.py` computes the rewards. Patterns
and schemas are only measured here, because to compile them may take long: `reward_patterns` checks them.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import ModelName, PluginName, Strict
from anneal.contracts.reward_patterns import MOST_PATTERN_CHARACTERS

_MOST_SCHEMA_CHARACTERS = 20_000

_MOST_BYTES = 64 * 1024
"""Limit for all rewards together: half of a trainer's largest record, which must contain the configuration."""

_LONG = ("schema", "pattern", "extract", "sections", "model", "name", "options")
"""Fields of a reward with unlimited length, which are the same after defaults are filled in."""

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATTERN_CHARACTERS)]
"""Regular expression of Python's `re`, of bounded length: `reward_patterns` compiles it, in a process."""


class _Weighted(Strict):
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Weight in the sum of all rewards.")


def _not_too_long_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema unchanged, if it is short enough to be checked by `reward_patterns`, in a process."""
    try:
        length = len(json.dumps(schema, ensure_ascii=False))
    except (RecursionError, TypeError, ValueError) as error:
        raise PydanticCustomError("bad_schema", "is not a JSON Schema: {why}", {"why": str(error)}) from None
    if length > _MOST_SCHEMA_CHARACTERS:
        message = "is too long: a schema has at most {most} characters"
        raise PydanticCustomError("bad_schema", message, {"most": f"{_MOST_SCHEMA_CHARACTERS:,}"})
    return schema


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
    schema_: Annotated[dict[str, Any], AfterValidator(_not_too_long_schema)] = Field(
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


def metric_names(rewards: Sequence[Reward]) -> list[str]:
    """Return the names of the rewards in metrics, in order: the type, for the second of a type `regex_2` and so on.

    Plugins have their name after the type.
    """
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        name = f"plugin_{reward.name}" if isinstance(reward, PluginReward) else reward.type
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def needs_answer(rewards: Sequence[Reward]) -> bool:
    """Return True if every row of the data must have an `answer`."""
    return any(reward.type in WITH_ANSWER for reward in rewards)

"""Rewards of method `rlhf`: their types, parameters and bounds.

Pure pydantic, no torch: the API validates with it; `worker/training/methods/rewards.py` computes the rewards. Patterns
and schemas are only measured here, because to compile them may take long: `reward_texts.patterns` checks them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import ModelName, PluginName, Strict, json_length
from anneal.contracts.reward_texts.patterns import MOST_PATTERN_CHARACTERS
from anneal.contracts.reward_texts.templates import COMPLETION, Template, template_columns

_MOST_SCHEMA_CHARACTERS = 20_000
_MOST_PARAMETER_CHARACTERS = 8_000
_OWN_PARAMETERS = {"model", "messages", "n", "stream", "stream_options", "tools"}
"""Fields of a request to a judge that no parameter can set."""

_MOST_BYTES = 64 * 1024
"""Limit for all rewards together: half of a trainer's largest record, which must contain the configuration."""

_LONG = (
    "schema", "pattern", "extract", "sections", "model", "name", "options", "url", "rubric", "parameters", "messages",
    "labels", "passing_labels", "input", "reference",
)  # fmt: skip
"""Fields of a reward with unlimited length, which are the same after defaults are filled in."""

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MOST_PATTERN_CHARACTERS)]
"""Regular expression of Python's `re`, of bounded length: `reward_texts.patterns` compiles it, in a process."""


SimilarityMetric = Literal[
    "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
]
"""Measure of the similarity of two texts."""


class _Weighted(Strict):
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Weight in the sum of all rewards.")


def _not_too_long_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema unchanged, if it is short enough to be checked by `reward_texts.patterns`, in a process."""
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


class StringCheckReward(_Weighted):
    """1 if the comparison of two texts is true, else 0."""

    type: Literal["string_check"]
    input: Template = Field(
        default=COMPLETION, description="Template of the checked text; 0 if the completion has no such value."
    )
    reference: Template = Field(description="Template of the text that it is compared with.")
    operation: Literal["eq", "ne", "like", "ilike"] = Field(
        default="eq",
        description="`eq`: both are equal; `ne`: they are not; `like`: `input` contains `reference`; `ilike`: the "
        "same, ignoring case.",
    )


class TextSimilarityReward(_Weighted):
    """Similarity of two texts, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template = Field(
        default=COMPLETION, description="Template of the rated text; 0 if the completion has no such value."
    )
    reference: Template = Field(description="Template of the text that it is compared with.")
    evaluation_metric: SimilarityMetric = Field(
        description="`fuzzy_match`: twice the length of the longest common subsequence by the sum of both lengths, in "
        "characters; `bleu`: of sacrebleu; `gleu`: of nltk; `rouge_…`: of rouge-score."
    )


class ModelReward(_Weighted):
    """Score of a reward model for prompt and completion."""

    type: Literal["model"]
    model: ModelName = Field(
        description="`run_…` of a finished run of method `reward`, a folder below the models root, or a hub name."
    )


_URL = re.compile(
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?", re.ASCII
)


def _checked_url(url: str) -> str:
    """Return the URL unchanged if it is one of a web server, without the parts that often have a key."""
    try:
        is_valid = _URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        message = (
            "must be http(s)://host[:port][/path] without user, password, `?` and `#`; the operator stores the key of "
            "a host as a secret"
        )
        raise PydanticCustomError("bad_url", message)
    return url


ServiceUrl = Annotated[str, StringConstraints(max_length=2_000), AfterValidator(_checked_url)]


class ServiceReward(_Weighted):
    """Fields of rewards that are calls over HTTP."""

    url: ServiceUrl = Field(description="URL that rows are posted to, on a host that the operator allows.")
    concurrency: int = Field(default=8, ge=1, le=64, description="Maximum number of requests at the same time.")
    timeout_seconds: float = Field(
        default=60.0, ge=0.1, le=600, description="Time for a response, after which the request is sent again."
    )


class HttpReward(ServiceReward):
    """Score that a service at a URL gives to the completion."""

    type: Literal["http"]
    rows_per_request: int = Field(default=16, ge=1, le=1_000, description="Maximum number of completions in a request.")


class JudgeMessage(Strict):
    """Message to a judge."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Template


_JudgeLabel = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^\S([^\r\n]*\S)?$")]


class JudgeReward(ServiceReward):
    """Mark that a chat model gives to the completion, from 0 (the lower end of the scale) to 1."""

    type: Literal["judge"]
    url: ServiceUrl = Field(
        description="Base URL of an OpenAI-compatible API on a host that the operator allows, such as "
        "`https://api.openai.com/v1`."
    )
    model: str = Field(min_length=1, max_length=200, description="Name of the model at that API.")
    rubric: str | None = Field(
        default=None,
        min_length=1,
        max_length=8_000,
        description="What is to be graded, and what earns which mark of the scale. Needed without `messages`.",
    )
    messages: list[JudgeMessage] | None = Field(
        default=None,
        min_length=1,
        max_length=20,
        description="Messages to the judge instead of `rubric`, each with `role` and `content`, a template; 0 if the "
        "completion has no such value.",
    )
    scale: list[float] = Field(
        default=[1.0, 10.0], min_length=2, max_length=2, description="Lowest and highest mark that the judge may give."
    )
    labels: list[_JudgeLabel] | None = Field(
        default=None, min_length=2, max_length=50, description="Labels that the judge chooses from, instead of a mark."
    )
    passing_labels: list[_JudgeLabel] | None = Field(
        default=None, min_length=1, max_length=50, description="Labels with a score of 1; that of the others is 0."
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of the requests, such as `max_tokens` or `reasoning_effort`; `temperature` is 0 "
        "unless it is given.",
    )

    @model_validator(mode="after")
    def _has_instructions(self) -> "JudgeReward":
        if (self.rubric is None) is (self.messages is None):
            raise PydanticCustomError("bad_instructions", "needs `rubric` or `messages`, and not both")
        if (self.labels is None) is not (self.passing_labels is None):
            raise PydanticCustomError("bad_instructions", "needs `labels` and `passing_labels`, or none of them")
        if unknown := set(self.passing_labels or ()) - set(self.labels or ()):
            message = "has `{label}` in `passing_labels`, which is not one of its `labels`"
            raise PydanticCustomError("bad_instructions", message, {"label": min(unknown)})
        return self

    @model_validator(mode="after")
    def _has_a_scale(self) -> "JudgeReward":
        if not self.scale[0] < self.scale[1]:
            raise PydanticCustomError("bad_bounds", "has a `scale` whose lowest mark is not below its highest")
        return self

    @model_validator(mode="after")
    def _has_valid_parameters(self) -> "JudgeReward":
        if (length := json_length(self.parameters)) is None:
            raise PydanticCustomError("bad_parameters", "has `parameters` that are not JSON")
        if length > _MOST_PARAMETER_CHARACTERS:
            message = "has `parameters` of more than {most} characters of JSON"
            raise PydanticCustomError("bad_parameters", message, {"most": f"{_MOST_PARAMETER_CHARACTERS:,}"})
        if own := sorted(self.parameters.keys() & _OWN_PARAMETERS):
            message = "has `{name}` in `parameters`, which the run sets itself; leave it out"
            raise PydanticCustomError("bad_parameters", message, {"name": own[0]})
        return self


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
    | StringCheckReward
    | TextSimilarityReward
    | ModelReward
    | HttpReward
    | JudgeReward
    | PluginReward,
    Field(discriminator="type"),
]
"""One term of the weighted sum."""


class RewardHost(Strict):
    """Host that the operator allows rewards to call."""

    name: str
    """Name or address, in lower case and without a port."""
    port: int | None = None
    """Only port that may be called; None: that of the scheme."""
    is_private: bool = False
    """True if it may have a private address, and be called without encryption."""
    secret: str | None = None
    """Name of the secret that it receives as a bearer token."""

    @property
    def key_variable(self) -> str | None:
        """Environment variable in which a training process receives the value of the secret."""
        return None if self.secret is None else f"ANNEAL_REWARD_KEY_{self.secret.upper()}"

    def allows(self, scheme: str, name: str, port: int | None) -> bool:
        """Return True if URLs of a scheme, a host in lower case and a port (None: that of the scheme) may be called."""
        default = _default_port(scheme)
        own_port = default if self.port is None else self.port
        return name == self.name and own_port == (default if port is None else port)


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def join_address(scheme: str, name: str, port: int | None) -> str:
    """Return a host as a setting names it, with the port if it is not that of the scheme."""
    if port is None or port == _default_port(scheme):
        return name
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


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


def templates_of(reward: Reward) -> list[str]:
    """Return the templates of a reward, which refer to columns of the row."""
    match reward:
        case StringCheckReward() | TextSimilarityReward():
            return [reward.input, reward.reference]
        case JudgeReward():
            return [message.content for message in reward.messages or ()]
        case _:
            return []


def referenced_columns(rewards: Iterable[Reward]) -> list[str]:
    """Return the columns of the row that templates of rewards refer to, each once."""
    return list(dict.fromkeys(name for reward in rewards for name in template_columns(templates_of(reward))))


WITH_ANSWER = ("exact_match", "numeric_match")
"""Types of rewards that compare a completion with the `answer` of its row."""

SERVICE_TYPES = ("http", "judge")
"""Types of rewards that are calls over HTTP."""

USAGE_METRICS = ("reward_calls", "reward_prompt_tokens", "reward_completion_tokens", "reward_missing")
"""Metrics that count what the rewards of a run that are calls have taken."""


def find_host(hosts: Iterable[RewardHost], url: str) -> tuple[str, RewardHost | None]:
    """Return the address of a URL as a setting names it, and that of the hosts which allows it, if one does."""
    try:
        parts = urlsplit(url)
        scheme, name, port = parts.scheme, parts.hostname or "", parts.port
    except ValueError:
        return "", None
    return join_address(scheme, name, port), next((host for host in hosts if host.allows(scheme, name, port)), None)


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

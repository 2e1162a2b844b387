"""Built-in rewards of method `rlhf`, as functions that TRL's trainers call.

Does not import torch. Patterns and schemas come from the user: each match is limited to one second, so that
catastrophic backtracking costs one reward and not the run.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from anneal.contracts.reward_texts.templates import MissingValue, missing_path, render_template
from anneal.contracts.rewards import (
    ExactMatchReward,
    FormatReward,
    JsonSchemaReward,
    LengthReward,
    ModelReward,
    NumericMatchReward,
    PluginReward,
    RegexReward,
    Reward,
    ServiceReward,
    StringCheckReward,
    TextSimilarityReward,
    metric_names,
    templates_of,
)
from worker.training.data.answers import last_number
from worker.training.methods.text_comparison import similarity

_TIMEOUT_SECONDS = 1.0
_MAX_TIMEOUTS = 3
"""Timeouts per call: a round has up to thousands of completions, and a second for each of them could be an hour."""
# As in CommonMark, with no backtick after the language: a long line of them would be scanned repeatedly.
_JSON_BLOCK = re.compile(r"```json[^\n`]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class _Completion:
    text: str
    tokens: Sequence[int]
    answer: str | None
    item: str
    """Columns of the row that templates refer to, as JSON."""


class _TimedOut(Exception):
    """A pattern or a schema of the user exceeded its time limit."""


def _ignore_call(*_: Any) -> None:
    """Ignore the call; the default callback."""


@dataclass
class RewardFunction:
    """A reward as TRL calls it; `__name__` is its name in metrics."""

    name: str
    judge: Callable[[_Completion], float | None]
    alive: Callable[[], None] = _ignore_call
    """Called after each completion as a heartbeat, since scoring all of them may take long."""
    warn: Callable[[str], None] = _ignore_call
    """Called once with a message if scoring repeatedly takes too long."""
    timeouts: int = field(default=0, init=False)
    """Number of completions that got 0 because scoring them took too long."""

    def __post_init__(self) -> None:
        self.__name__ = self.name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[str | None] | None = None,
        item: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one reward per completion (a text or a list of messages); None where there is no reference answer."""
        answers = answer if answer is not None else [None] * len(completions)
        items = item if item is not None else ["{}"] * len(completions)
        given_up_at = self.timeouts + _MAX_TIMEOUTS
        scores: list[float | None] = []
        for completion, tokens, expected, of_row in zip(completions, completion_ids, answers, items, strict=True):
            given_up = self.timeouts >= given_up_at
            text = _completion_text(completion)
            scores.append(0.0 if given_up else self._score_completion(_Completion(text, tokens, expected, of_row)))
            self.alive()
        return scores

    def _score_completion(self, completion: _Completion) -> float | None:
        try:
            return self.judge(completion)
        except _TimedOut:
            self.timeouts += 1
            # Counted over all calls: a call with few completions would never reach the number.
            if self.timeouts == _MAX_TIMEOUTS:
                self.warn(
                    f"Reward `{self.name}` took longer than {_TIMEOUT_SECONDS:g} second to score each of "
                    f"{_MAX_TIMEOUTS} completions: its pattern or schema is too slow for what the model generates. "
                    f"They got 0 from it, and in each round all others get 0 after {_MAX_TIMEOUTS} such completions. "
                    "Stop this run and start one without this reward, or with a pattern without nested repetition such "
                    "as `(a+)+`."
                )
            return 0.0


def build_reward_functions(
    rewards: Sequence[Reward],
    tokenizer: Any,
    alive: Callable[[], None] = _ignore_call,
    warn: Callable[[str], None] = _ignore_call,
) -> list[RewardFunction]:
    """Create one function for each reward that is no model, service or plugin, in order, without weights.

    Only `all_special_ids` of `tokenizer` is used. `alive` is called after every completion, and `warn` once for a
    reward that is too slow.
    """
    return [
        RewardFunction(name, _build_scorer(reward, tokenizer), alive, warn)
        for name, reward in zip(metric_names(rewards), rewards, strict=True)
        if not isinstance(reward, ModelReward | PluginReward | ServiceReward)
    ]


def _build_scorer(reward: Reward, tokenizer: Any) -> Callable[[_Completion], float | None]:
    match reward:
        case ExactMatchReward():
            return _exact_match(reward)
        case NumericMatchReward():
            return _numeric_match(reward)
        case RegexReward():
            return _regex_scorer(reward)
        case JsonSchemaReward():
            return _json_schema(reward)
        case LengthReward():
            return _length_scorer(reward, frozenset(tokenizer.all_special_ids))
        case FormatReward():
            return _format_scorer(reward)
        case StringCheckReward():
            return _comparison_scorer(reward, _STRING_CHECKS[reward.operation])
        case TextSimilarityReward():
            return _comparison_scorer(reward, similarity(reward.evaluation_metric))
        case ModelReward() | PluginReward() | ServiceReward():
            raise TypeError(f"a reward of type {reward.type} is not built in here")


def _completion_text(completion: Any) -> str:
    # A message that only calls tools has no content.
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def _exact_match(reward: ExactMatchReward) -> Callable[[_Completion], float | None]:
    extract = _build_extractor(reward.extract)

    def normalize_text(text: str) -> str:
        text = text.strip() if reward.strip else text
        return text.casefold() if reward.ignore_case else text

    def judge(completion: _Completion) -> float | None:
        if completion.answer is None:
            return None
        extracted = extract(completion.text)
        return float(extracted is not None and normalize_text(extracted) == normalize_text(completion.answer))

    return judge


def _numeric_match(reward: NumericMatchReward) -> Callable[[_Completion], float | None]:
    extract = _build_extractor(reward.extract)

    def judge(completion: _Completion) -> float | None:
        expected = last_number(completion.answer or "")
        if expected is None:
            return None
        extracted = last_number(extract(completion.text) or "")
        if extracted is None:
            return 0.0
        return float(
            math.isclose(extracted, expected, rel_tol=reward.relative_tolerance, abs_tol=reward.absolute_tolerance)
        )

    return judge


def _regex_scorer(reward: RegexReward) -> Callable[[_Completion], float]:
    pattern = regex.compile(reward.pattern)
    matches = pattern.search if reward.mode == "search" else pattern.fullmatch
    return lambda completion: float(_in_time(matches, completion.text) is not None)


def _build_extractor(pattern: str | None) -> Callable[[str], str | None]:
    """Return a function that extracts the last match's first group, or the whole match; None without a match.

    Without a pattern the whole text counts.
    """
    if pattern is None:
        return lambda text: text
    compiled = regex.compile(pattern)

    def extract(text: str) -> str | None:
        matches = _in_time(lambda text, timeout: list(compiled.finditer(text, timeout=timeout)), text)
        if not matches:
            return None
        last = matches[-1]
        group: str | None = last[1] if compiled.groups else None
        return group if group is not None else str(last[0])

    return extract


def _in_time(matching: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return matching(*arguments, timeout=_TIMEOUT_SECONDS)
    except (TimeoutError, MemoryError):
        raise _TimedOut from None


def _length_scorer(reward: LengthReward, special: frozenset[int]) -> Callable[[_Completion], float]:
    def measure_length(completion: _Completion) -> int:
        match reward.unit:
            case "tokens":
                return sum(token not in special for token in completion.tokens)
            case "characters":
                return len(completion.text)
            case "words":
                return len(completion.text.split())

    def judge(completion: _Completion) -> float:
        length = measure_length(completion)
        outside = max(reward.min - length, length - (length if reward.max is None else reward.max), 0)
        if outside == 0:
            return 1.0
        return max(0.0, 1 - outside / reward.slack) if reward.slack else 0.0

    return judge


def _format_scorer(reward: FormatReward) -> Callable[[_Completion], float]:
    tags = re.compile(f"</?(?:{'|'.join(map(re.escape, reward.sections))})>")
    expected = [tag for section in reward.sections for tag in (f"<{section}>", f"</{section}>")]
    return lambda completion: float(tags.findall(completion.text) == expected)


_STRING_CHECKS: Mapping[str, Callable[[str, str], float]] = {
    "eq": lambda text, reference: float(text == reference),
    "ne": lambda text, reference: float(text != reference),
    "like": lambda text, reference: float(reference in text),
    "ilike": lambda text, reference: float(reference.casefold() in text.casefold()),
}


def _comparison_scorer(
    reward: StringCheckReward | TextSimilarityReward, compare: Callable[[str, str], float]
) -> Callable[[_Completion], float | None]:
    def judge(completion: _Completion) -> float | None:
        item = json.loads(completion.item)
        if missing_path(templates_of(reward), item) is not None:
            return None
        try:
            texts = [render_template(template, item, completion.text) for template in templates_of(reward)]
        except MissingValue:
            return 0.0  # the completion is not JSON with such a member
        return compare(*texts)

    return judge


def _json_schema(reward: JsonSchemaReward) -> Callable[[_Completion], float]:
    schema = _BoundedSchema(reward.schema_)

    def judge(completion: _Completion) -> float:
        blocks = _JSON_BLOCK.findall(completion.text)
        try:
            document = json.loads(blocks[-1] if blocks else completion.text, parse_constant=_not_json)
            return float(schema.is_valid(document))
        except (ValueError, RecursionError, ArithmeticError):
            return 0.0

    return judge


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class _BoundedSchema:
    """A JSON schema whose validation of a document is limited to one second of processor time.

    Other processes on a busy machine must not change a reward.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        own: dict[str, Any] = {
            "pattern": self._check_pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "uniqueItems": self._unique_items,
        }
        # The time of one keyword is bounded by its value and the instance; the number of checks is not bounded.
        checks = {name: self._in_time(check) for name, check in {**Draft202012Validator.VALIDATORS, **own}.items()}
        # If a schema names its draft, the library would use its own checks for that draft instead of these.
        without_draft = {name: value for name, value in schema.items() if name != "$schema"}
        self._validator = extend(Draft202012Validator, checks)(without_draft)
        self._deadline = 0.0

    def is_valid(self, document: Any) -> bool:
        """Return True if the document is valid; raise `_TimedOut` after a second."""
        self._deadline = time.thread_time() + _TIMEOUT_SECONDS
        return bool(self._validator.is_valid(document))

    def _in_time(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def check_in_time(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._seconds_left()
            return check(validator, value, instance, schema)

        return check_in_time

    def _seconds_left(self) -> float:
        """Return the seconds left; raise `_TimedOut` if there are none."""
        left = self._deadline - time.thread_time()
        if left <= 0:
            raise _TimedOut
        return left

    def _unique_items(self, validator: Any, is_required: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
        # The library's own check compares every item with every other.
        if is_required and isinstance(instance, list):
            seen: set[str] = set()
            for item in instance:
                self._seconds_left()
                seen.add(json.dumps(_canonical_value(item), sort_keys=True))
            if len(seen) < len(instance):
                yield ValidationError("has an item twice")

    def _check_pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not self._matches_pattern(pattern, instance):
            yield ValidationError("does not match")

    def _pattern_properties(
        self, validator: Any, patterns: dict[str, Any], instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for pattern, inner in patterns.items():
                for name, value in instance.items():
                    if self._matches_pattern(pattern, name):
                        yield from validator.descend(value, inner, path=name, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, inner: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for name in self._additional_names(schema, instance):
                yield from validator.descend(instance[name], inner, path=name)

    def _additional_names(self, schema: dict[str, Any], instance: Iterable[str]) -> Iterator[str]:
        patterns = schema.get("patternProperties", {})
        for name in instance:
            if name not in schema.get("properties", {}) and not any(
                self._matches_pattern(one, name) for one in patterns
            ):
                yield name

    def _matches_pattern(self, pattern: str, text: str) -> bool:
        left = self._seconds_left()
        try:
            return regex.search(pattern, text, timeout=left) is not None
        except (TimeoutError, MemoryError):
            raise _TimedOut from None


def _canonical_value(value: Any) -> Any:
    """Return the value with `1.0` as `1`, which are equal in JSON Schema."""
    if isinstance(value, dict):
        return {name: _canonical_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_canonical_value(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

"""Graders of OpenAI's reinforcement fine-tuning, and the rewards that they become."""

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from anneal.contracts.errors import FieldError
from anneal.contracts.reward_texts.templates import Template
from anneal.contracts.schemas.runs.common import Body

JUDGE_URL = "https://api.openai.com/v1"
"""API whose models grade, unless the job names another one."""
_UNSUPPORTED_METRICS = {
    "cosine": "compares embeddings of another model",
    "meteor": "needs the synonyms of WordNet, which is not installed here",
}
_PARAMETERS = {
    "max_completions_tokens": "max_completion_tokens", "reasoning_effort": "reasoning_effort", "seed": "seed",
    "temperature": "temperature", "top_p": "top_p",
}  # fmt: skip
"""Fields of a request to a chat model, by the sampling parameters of a grader."""

_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Labels = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=50)]


class StringCheckGrader(Body):
    """Comparison of two texts."""

    type: Literal["string_check"]
    name: _Name
    input: Template
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarityGrader(Body):
    """Similarity of two texts."""

    type: Literal["text_similarity"]
    name: _Name
    input: Template
    reference: Template
    evaluation_metric: Literal[
        "cosine", "fuzzy_match", "bleu", "gleu", "meteor", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5",
        "rouge_l",
    ]  # fmt: skip


def _join_parts(content: Any) -> Any:
    """Return a content as one text: OpenAI's is a text, a part, or a list of both."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else "input_text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
            message = "has a part that is no text, and models that grade are sent text only; leave it out"
            raise PydanticCustomError("unsupported_content", message)
        texts.append(text)
    return "".join(texts)


class GraderMessage(Body):
    """Message to a model that grades."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Template, BeforeValidator(_join_parts)] = Field(
        description="Text, or a list of parts of the type `input_text`, which are joined."
    )
    type: Literal["message"] | None = None


_Messages = Annotated[list[GraderMessage], Field(min_length=1, max_length=20)]


class SamplingParameters(Body):
    """Sampling parameters of a model that grades."""

    max_completions_tokens: int | None = Field(default=None, ge=1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    seed: int | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)


class ScoreModelGrader(Body):
    """Score that a chat model gives."""

    type: Literal["score_model"]
    name: _Name
    model: _Name
    input: _Messages
    range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    sampling_params: SamplingParameters | None = None


class LabelModelGrader(Body):
    """Label that a chat model assigns."""

    type: Literal["label_model"]
    name: _Name
    model: _Name
    input: _Messages
    labels: _Labels
    passing_labels: _Labels


class PythonGrader(Body):
    """Program that computes a score; refused."""

    type: Literal["python"]
    name: _Name
    source: str
    image_tag: str | None = None


SingleGrader = Annotated[
    StringCheckGrader | TextSimilarityGrader | ScoreModelGrader | LabelModelGrader | PythonGrader,
    Field(discriminator="type"),
]


def _by_name(graders: Any) -> Any:
    """Return graders by name; the types of OpenAI's client have a single grader in their place."""
    if isinstance(graders, dict) and isinstance(graders.get("type"), str):
        return {str(graders.get("name")): graders}
    return graders


class MultiGrader(Body):
    """Sum of the scores of several graders."""

    type: Literal["multi"]
    name: _Name
    graders: Annotated[dict[_Name, SingleGrader], Field(min_length=1, max_length=20), BeforeValidator(_by_name)]
    calculate_output: str = Field(min_length=1, max_length=1_000)


Grader = Annotated[
    StringCheckGrader | TextSimilarityGrader | ScoreModelGrader | LabelModelGrader | PythonGrader | MultiGrader,
    Field(discriminator="type"),
]

_GRADER: JsonDict = {
    "type": "string_check", "name": "answer", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
    "operation": "eq",
}  # fmt: skip


class GraderValidate(Body):
    """Request to validate a grader."""

    model_config = ConfigDict(json_schema_extra={"example": {"grader": _GRADER}})

    grader: Grader


class GraderValidated(BaseModel):
    """Valid grader."""

    model_config = ConfigDict(json_schema_extra={"example": {"grader": _GRADER}})

    grader: Grader


def to_rewards(grader: Grader, judge_url: str, place: str) -> tuple[list[dict[str, Any]], list[FieldError]]:
    """Return the rewards of a grader, and errors of what has no counterpart; `place` is the field of the grader.

    Models that grade are called at `judge_url`.
    """
    if not isinstance(grader, MultiGrader):
        errors = list(_unsupported(grader, place))
        return ([] if errors else [_to_reward(grader, 1.0, judge_url)]), errors
    errors = [
        error for name, member in grader.graders.items() for error in _unsupported(member, f"{place}.graders.{name}")
    ]
    try:
        weights = parse_weighted_sum(grader.calculate_output, grader.graders)
    except ValueError as error:
        errors.append(FieldError(field=f"{place}.calculate_output", code="not_supported", message=str(error)))
    if errors:
        return [], errors
    return [_to_reward(member, weights[name], judge_url) for name, member in grader.graders.items()], []


def _unsupported(grader: SingleGrader, place: str) -> Iterator[FieldError]:
    match grader:
        case PythonGrader():
            message = (
                "is `python`, whose program is not run here; let the operator install it as a reward plugin, or serve "
                'it over HTTP, leave `method` out, and set `anneal.config` to {"method": "rlhf", "rlhf": {"rewards": '
                '[{"type": "plugin", …}]}}, or `http`'
            )
            yield FieldError(field=f"{place}.type", code="not_supported", message=message)
        case TextSimilarityGrader() if grader.evaluation_metric in _UNSUPPORTED_METRICS:
            message = (
                f"is `{grader.evaluation_metric}`, which {_UNSUPPORTED_METRICS[grader.evaluation_metric]}; use "
                "`fuzzy_match`, `bleu`, `gleu` or one of `rouge_…`"
            )
            yield FieldError(field=f"{place}.evaluation_metric", code="not_supported", message=message)


def _to_reward(grader: SingleGrader, weight: float, judge_url: str) -> dict[str, Any]:
    match grader:
        case StringCheckGrader() | TextSimilarityGrader():
            return {**grader.model_dump(exclude={"name"}), "weight": weight}
        case ScoreModelGrader():
            low, high = grader.range or (0.0, 1.0)
            sampling = grader.sampling_params.model_dump(exclude_none=True) if grader.sampling_params else {}
            # 1 is the default of OpenAI's API, and the only temperature of its models that reason.
            parameters = {"temperature": 1.0, **{_PARAMETERS[name]: value for name, value in sampling.items()}}
            # A judge's mark counts from 0 to 1; in its group of completions only differences matter.
            scaled = {"scale": [low, high], "weight": weight * (high - low), "parameters": parameters}
            return {**_judge(grader, judge_url), **scaled}
        case LabelModelGrader():
            labels = {"labels": grader.labels, "passing_labels": grader.passing_labels}
            return {**_judge(grader, judge_url), **labels, "weight": weight, "parameters": {"temperature": 1.0}}
        case PythonGrader():
            raise TypeError("a grader of type python has no reward")


def _judge(grader: ScoreModelGrader | LabelModelGrader, url: str) -> dict[str, Any]:
    messages = [{"role": message.role, "content": message.content} for message in grader.input]
    return {"type": "judge", "url": url, "model": grader.model, "messages": messages}


_Terms = dict[str, float]
"""Factor of each grader in a formula; that of the empty name is the constant."""


def parse_weighted_sum(formula: str, names: Collection[str]) -> dict[str, float]:
    """Return the weight of each grader in a formula.

    Raises:
        ValueError: The formula is not a weighted sum of these graders; the message is for its author.
    """
    try:
        terms = _terms_of(ast.parse(formula.strip(), mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError, OverflowError):
        raise ValueError("is not a formula; write a weighted sum such as `0.8 * accuracy + 0.2 * style`") from None
    if terms.pop("", 0.0) != 0:
        raise ValueError("has a number that no grader is multiplied by, which changes nothing; leave it out")
    return {name: terms.get(name, 0.0) for name in names}


_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _terms_of(node: ast.expr, names: Collection[str]) -> _Terms:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return {"": float(number)}
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"names `{name[:60]}`, which is not in `graders`; use the names of the graders there")
            return {name: 1.0}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            factor = -1.0 if isinstance(sign, ast.USub) else 1.0
            return {name: factor * value for name, value in _terms_of(operand, names).items()}
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            first, second = _terms_of(left, names), _terms_of(right, names)
            compute = _OPERATORS[type(sign)]
            return {name: compute(first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}}
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as sign, right=right):
            first, second = _terms_of(left, names), _terms_of(right, names)
            if isinstance(sign, ast.Mult) and first.keys() <= {""}:
                first, second = second, first
            if second.keys() <= {""}:
                compute, factor = _OPERATORS[type(sign)], second.get("", 0.0)
                return {name: compute(value, factor) for name, value in first.items()}
    raise ValueError(
        "is not a weighted sum of graders, which is all that a sum of rewards can compute; write for example "
        "`0.8 * accuracy + 0.2 * style`"
    )

"""Prompts that a model completes: those of samples (texts and chats), and options of predictions over a dataset."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import DatasetFormat, Strict
from anneal.contracts.human_numbers import COUNT
from anneal.contracts.rewards import Rewards

MOST_PROMPT_CHARACTERS = 8_000
"""Maximum total length of the prompts of a run or an action."""

PromptText = Annotated[str, StringConstraints(min_length=1, max_length=4_000)]


class PromptMessage(Strict):
    """Message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: PromptText


SamplePrompt = Annotated[
    Annotated[PromptText, Tag("text")]
    | Annotated[list[PromptMessage], Field(min_length=1, max_length=20), Tag("chat")],
    Discriminator(lambda prompt: "chat" if isinstance(prompt, list) else "text"),
]


def _limit_characters(prompts: list[Any]) -> list[Any]:
    texts = [[prompt] if isinstance(prompt, str) else [message.content for message in prompt] for prompt in prompts]
    if sum(len(text) for several in texts for text in several) > MOST_PROMPT_CHARACTERS:
        reason = f"must have at most {MOST_PROMPT_CHARACTERS:,} characters in total; shorten or remove some prompts"
        raise PydanticCustomError("out_of_range", "{reason}", {"reason": reason})
    return prompts


SamplePrompts = Annotated[list[SamplePrompt], AfterValidator(_limit_characters)]

Score = Literal["exact_match", "contains", "rouge_l", "bleu", "chrf"]
"""Comparison of an answer with the reference of its row."""

SCORES: tuple[Score, ...] = ("exact_match", "contains", "rouge_l", "bleu", "chrf")

PREDICTABLE_FORMATS: tuple[DatasetFormat, ...] = ("chat", "prompt_completion", "prompt")
"""Formats of datasets whose rows have a prompt."""

_StopText = Annotated[str, StringConstraints(min_length=1, max_length=100)]


class PredictOptions(Strict):
    """Options of a prediction."""

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000), COUNT] = Field(
        default=256, description="Maximum number of tokens of an answer."
    )
    temperature: float = Field(default=0.0, ge=0, le=100, description="Sampling temperature; 0: greedy decoding.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the most probable tokens that have this probability together."
    )
    top_k: Annotated[int, Field(ge=1, le=1_000_000), COUNT] | None = Field(
        default=None, description="Sample from so many of the most probable tokens; null: from all."
    )
    stop: list[_StopText] = Field(
        default_factory=list, max_length=16, description="Texts that end an answer, which does not contain them."
    )
    system_prompt: str | None = Field(
        default=None,
        min_length=1,
        max_length=32_768,
        description="System message of chats that have none; a prompt that is a text becomes a user message after it.",
    )
    batch_tokens: Annotated[int, Field(ge=1, le=100_000_000), COUNT] | None = Field(
        default=None,
        description="Maximum number of tokens of a batch, prompts and answers together; null: what fits into half of "
        "the free memory of the device.",
    )
    scores: list[Score] | None = Field(
        default=None,
        max_length=len(SCORES),
        description="Scores of the answers, compared with the references; null: all, if the rows have references.",
    )
    rewards: Rewards = Field(
        default_factory=list,
        description="Rewards as those of method `rlhf`, which also score the answers: their values become scores.",
    )

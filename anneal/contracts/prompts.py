"""Prompts that the model completes as samples: texts and chats."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import Strict

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

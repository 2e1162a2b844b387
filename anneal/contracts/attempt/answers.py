"""Questions to the model of a serving run, and the pieces of its answers, as API, supervisor and process send them."""

from typing import Literal

from pydantic import Field, model_validator

from anneal.contracts.field_types import JsonObject, Strict

MOST_STOP_TEXTS = 4
MOST_CHOICES = 128

FinishReason = Literal["stop", "length", "tool_calls"]
"""`stop`: the model or a stop text has ended the answer; `length`: it has its maximum number of tokens, or those that
the model takes; `tool_calls`: the model has called tools."""

AnswerErrorCode = Literal[
    "context_length_exceeded", "invalid_prompt", "tools_not_supported", "unusable_model", "out_of_memory", "internal"
]
"""Reasons of an error. The first three are about the question, the others about the model or its device."""


class Question(Strict):
    """Question to a model: a chat or a prompt, of which exactly one is set, and how to answer it."""

    id: str
    created_at: float
    """Unix time in seconds."""
    adapter: str | None = None
    """Key of an adapter on the model of the serving run; None: the model itself."""
    messages: list[JsonObject] | None = None
    """Chat, in the form of OpenAI."""
    prompt: str | list[int] | None = None
    """Text, or its token ids."""
    tools: list[JsonObject] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of each choice; None: what is left of the model's context."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Sampling temperature; 0: greedy decoding."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    stop: list[str] = Field(default_factory=list, max_length=MOST_STOP_TEXTS)
    """Texts that end an answer, which does not contain them."""
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    """Number of choices, each an answer of its own."""

    @model_validator(mode="after")
    def _has_either_chat_or_prompt(self) -> "Question":
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("a question has either messages or a prompt")
        return self


class ToolCall(Strict):
    """Call of a tool that the model asks for."""

    name: str
    arguments: str
    """JSON object, or the next part of one."""
    is_continued: bool = False
    """True if `arguments` continue those of the previous call of the choice, since they are too long for a piece."""


class AnswerError(Strict):
    """Reason why a question has no answer, or no more of it."""

    code: AnswerErrorCode
    message: str
    """Sentence for the user."""


class AnswerPiece(Strict):
    """Next part of one choice, or the error that ends all choices of a question."""

    question_id: str
    choice: int = 0
    text: str = ""
    tokens: int = 0
    """Number of tokens since the previous piece of this choice."""
    prompt_tokens: int | None = None
    """Number of tokens of the prompt, in the first piece of a question."""
    finish_reason: FinishReason | None = None
    """Set in the last piece of a choice."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Set in the last piece of a choice; long ones in several pieces, up to the last."""
    error: AnswerError | None = None

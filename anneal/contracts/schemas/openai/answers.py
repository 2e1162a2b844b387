"""Wire models of questions to a model and their answers in the OpenAI-compatible API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from anneal.contracts.attempt.answers import MOST_STOP_TEXTS, FinishReason
from anneal.contracts.field_types import JsonObject
from anneal.contracts.schemas.runs.common import RUN_ID

MOST_CHOICES = 16
MOST_MESSAGES = 2048
MOST_TOOLS = 128
_ID = "01k3x9m6q2v8s4t0w7y5z1a3b6"

_StopText = Annotated[str, StringConstraints(min_length=1, max_length=100)]
_StopTexts = Annotated[list[_StopText], Field(max_length=MOST_STOP_TEXTS)]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Part):
    """Part of the content of a message; models take text only."""

    type: Literal["text"]
    text: str


class FunctionCall(_Part):
    """Function that the model calls, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallObject(_Part):
    """Call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Part):
    """Message of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: _Name | None = None
    tool_calls: list[ToolCallObject] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None
    refusal: None = None


class FunctionTool(_Part):
    """Function that the model may call."""

    name: _Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_Part):
    """Tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(_Part):
    """Options of a streamed answer."""

    include_usage: bool = Field(default=False, description="Send a last chunk with the usage.")


class AnswerRequest(BaseModel):
    """Parameters that questions of both kinds have. Others are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str = Field(
        min_length=1,
        max_length=300,
        description="Model that answers: a base model; `run_…`, the output of a run, or its name; or `ckpt_…`, a "
        "checkpoint.",
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="Null: 1; 0: the most probable tokens.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Null: 1.")
    max_tokens: int | None = Field(default=None, ge=1, description="Maximum number of tokens of each choice.")
    stop: _StopText | _StopTexts | None = Field(default=None, description="Texts that end an answer, without them.")
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1, description="Null: another one each time.")
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="Number of choices; null: 1.")
    stream: bool | None = Field(default=None, description="True: send the answer as it is written.")
    stream_options: StreamOptions | None = None

    @property
    def stop_texts(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sends_usage(self) -> bool:
        """True if a streamed answer ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(AnswerRequest):
    """Question to a model as a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": RUN_ID, "messages": [{"role": "user", "content": "What does annealing do?"}], "temperature": 0,
                "max_completion_tokens": 64,
            }
        }
    )  # fmt: skip

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The same as `max_tokens`, which is older; null: what the model takes."
    )
    tools: list[Tool] | None = Field(default=None, max_length=MOST_TOOLS)


class CompletionRequest(AnswerRequest):
    """Question to a model as a text to continue."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"model": RUN_ID, "prompt": "Annealing is", "max_tokens": 32}}
    )

    prompt: str | Annotated[list[int], Field(fail_fast=True)] | Annotated[list[str], Field(fail_fast=True)] = Field(
        description="Text or token ids; a list may contain one text."
    )


class Usage(BaseModel):
    """Tokens of a question and its answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(BaseModel):
    """Message that the model has written."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallObject] | None = None


class _Choice(BaseModel):
    index: int
    logprobs: None = None
    finish_reason: FinishReason


class ChatChoice(_Choice):
    """One of the answers to a chat."""

    message: AnswerMessage


class _Answers(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Answers):
    """Answers to a chat. With `stream`, it comes as `chat.completion.chunk` objects in server-sent events."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": f"chatcmpl-{_ID}", "object": "chat.completion", "created": 1767323045, "model": RUN_ID,
                "choices": [{
                    "index": 0, "message": {"role": "assistant", "content": "It makes a material less brittle."},
                    "logprobs": None, "finish_reason": "stop",
                }],
                "usage": {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22},
            }
        }
    )  # fmt: skip

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].message.content or ""


class IndexedToolCall(ToolCallObject):
    """Call of a tool in a part of an answer, which has the whole call."""

    index: int


class ChunkDelta(BaseModel):
    """Text and tool calls that a part of an answer appends to the message of a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[IndexedToolCall] | None = None


class ChunkChoice(BaseModel):
    """Next part of one of the answers to a chat."""

    index: int
    delta: ChunkDelta
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """Next part of the answers to a chat, as an event of a stream has it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text that it adds to the first choice."""
        return "".join(choice.delta.content or "" for choice in self.choices if choice.index == 0)


class TextChoice(_Choice):
    """One of the continuations of a text."""

    text: str


class Completion(_Answers):
    """Continuations of a text. With `stream`, it comes in pieces of the same form in server-sent events."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": f"cmpl-{_ID}", "object": "text_completion", "created": 1767323045, "model": RUN_ID,
                "choices": [{"index": 0, "text": " a heat treatment.", "logprobs": None, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9},
            }
        }
    )  # fmt: skip

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]

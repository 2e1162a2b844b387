"""Chunks of a streamed answer in OpenAI's form, as an external engine sends them, and the pieces that they become."""

from collections import defaultdict
from collections.abc import Iterator

from pydantic import BaseModel, Field

from anneal.contracts.attempt.answers import AnswerPiece, FinishReason, ToolCall


class EngineError(BaseModel):
    """Error in OpenAI's form."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None
    """vLLM sends the status here, which a stream has sent before."""


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: EngineError


class _Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class _ToolCallPart(BaseModel):
    index: int
    function: _Function


class _Delta(BaseModel):
    content: str | None = None
    tool_calls: list[_ToolCallPart] | None = None


class _Choice(BaseModel):
    index: int
    delta: _Delta = Field(default_factory=_Delta)
    """Of a chat."""
    text: str | None = None
    """Of the continuation of a text."""
    finish_reason: FinishReason | None = None
    """Any other reason, such as `abort`, means that there is no whole answer: the chunk is invalid."""


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: EngineError | None = None


class ErrorChunk(Exception):
    """Raised for an error in place of a chunk."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.error = error


class ChunkReader:
    """Reads the chunks of one answer; the piece that ends it is returned last, with the usage that follows it."""

    def __init__(self, choices: int) -> None:
        self._open_choices = set(range(choices))
        self._tool_calls: dict[int, dict[int, list[str]]] = defaultdict(dict)
        """Name and arguments of each call, by choice and index."""
        self._last: AnswerPiece | None = None
        self._usage: _Usage | None = None

    def read_chunk(self, data: str) -> Iterator[AnswerPiece]:
        """Yield the pieces of a chunk.

        Raises:
            ErrorChunk: It is an error.
            ValueError: It is none.
        """
        chunk = _Chunk.model_validate_json(data)
        if chunk.error is not None:
            raise ErrorChunk(chunk.error)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if choice.index in self._open_choices and (piece := self._read_choice(choice)) is not None:
                yield piece

    def read_end(self) -> AnswerPiece:
        """Return the last piece, at the end of the stream; raise `ValueError` if the answer has not ended."""
        if self._last is None:
            raise ValueError("the stream ends before the answer")
        if self._usage is None:
            return self._last
        usage = {"prompt_tokens": self._usage.prompt_tokens, "tokens": self._usage.completion_tokens}
        return self._last.model_copy(update=usage)

    def _read_choice(self, choice: _Choice) -> AnswerPiece | None:
        calls = self._tool_calls[choice.index]
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
        text = choice.delta.content or choice.text or ""
        if choice.finish_reason is None:
            return AnswerPiece(question_id="", choice=choice.index, text=text) if text else None
        self._open_choices.remove(choice.index)
        piece = AnswerPiece(
            question_id="",
            choice=choice.index,
            text=text,
            finish_reason=choice.finish_reason,
            tool_calls=[ToolCall(name=name, arguments=arguments) for name, arguments in calls.values()],
        )
        if self._open_choices:
            return piece
        self._last = piece
        return None

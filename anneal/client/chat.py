"""Methods `client.chat` and `client.stream_chat`: questions to trained models and base models."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, Unpack

from anneal.client.api_resource import ApiResource
from anneal.client.errors import AnnealError, error_of_event
from anneal.client.event_stream import check_content_type
from anneal.client.sync_async import M, call, stream
from anneal.client.transport import parse_response
from anneal.contracts.attempt.answers import FinishReason
from anneal.contracts.schemas.openai.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ToolCallObject,
)

Messages = str | Sequence[Mapping[str, Any]]
"""A text, or a chat: messages with `role` and `content`, as in OpenAI's API."""


class ChatOptions(TypedDict, total=False):
    """Options of an answer, as in OpenAI's API."""

    temperature: float
    top_p: float
    max_tokens: int
    stop: str | Sequence[str]
    seed: int
    n: int
    tools: Sequence[Mapping[str, Any]]


class Chats(ApiResource[M]):
    """Questions to a model: a run, by its id or name, stands for its output; else a checkpoint or a base model."""

    @call
    async def chat(self, model: str, messages: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Return the answer of a model to a text or a chat; `text` of the result is that of its first choice.

        No timeout limits the time that loading and writing take: the answer is read as a stream.
        """
        async with aclosing(self._read_chunks(model, messages, options)) as chunks:
            return await _collect(chunks)

    @stream
    async def stream_chat(
        self,
        model: str,
        messages: Messages,
        *,
        on_serving_run: Callable[[str], None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatChunk]:
        """Iterate over the parts of an answer as they are written; closing the iterator ends the answer.

        `on_serving_run` is called with the id of the serving run, whose model may not be loaded yet.
        """
        async with aclosing(self._read_chunks(model, messages, options, on_serving_run)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _read_chunks(
        self,
        model: str,
        messages: Messages,
        options: ChatOptions,
        on_serving_run: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[ChatChunk]:
        """Yield the parts of an answer; the last one has its usage."""
        transport = self._session.transport
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        body = {"model": model, "messages": chat, **options, "stream": True, "stream_options": {"include_usage": True}}
        request = transport.build_request("POST", f"{transport.url}/openai/v1/chat/completions", json=body)
        response = await self._session.send_repeatedly(request, repeatable=True)
        try:
            check_content_type(response, transport.url)
            if on_serving_run is not None and (run_id := response.headers.get("x-anneal-run")):
                on_serving_run(run_id)
            async with aclosing(transport.iterate_sse(response)) as events:
                async for event in events:
                    if event.data == "[DONE]":
                        return
                    if (error := error_of_event(event.data)) is not None:
                        raise error
                    yield parse_response(ChatChunk, event.data.encode())
        finally:
            await transport.close_response(response)
        raise _broken_answer()


async def _collect(chunks: AsyncGenerator[ChatChunk]) -> ChatCompletion:
    """Return the whole answer of which these are the parts."""
    messages: dict[int, AnswerMessage] = {}
    finish_reasons: dict[int, FinishReason] = {}
    last: ChatChunk | None = None
    async for chunk in chunks:
        last = chunk
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, AnswerMessage(content=""))
            message.content = f"{message.content}{choice.delta.content or ''}"
            for tool_call in choice.delta.tool_calls or ():
                called = ToolCallObject(id=tool_call.id, function=tool_call.function)
                message.tool_calls = [*(message.tool_calls or ()), called]
            if choice.finish_reason is not None:
                finish_reasons[choice.index] = choice.finish_reason
    if last is None or last.usage is None or finish_reasons.keys() != messages.keys():
        raise _broken_answer()
    choices = [
        ChatChoice(index=index, message=message, finish_reason=finish_reasons[index])
        for index, message in sorted(messages.items())
    ]
    return ChatCompletion(id=last.id, created=last.created, model=last.model, choices=choices, usage=last.usage)


def _broken_answer() -> AnnealError:
    return AnnealError("stream_broken", "The answer ended before its last part: ask again.")

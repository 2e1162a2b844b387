"""`/openai/v1/chat/completions` and `/openai/v1/completions`: answers of models and their adapters."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, BackgroundTasks, Depends, Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from anneal.contracts.attempt.answers import AnswerPiece, FinishReason, Question
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.answers import (
    AnswerMessage,
    AnswerRequest,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Completion,
    CompletionRequest,
    FunctionCall,
    TextChoice,
    ToolCallObject,
    Usage,
)
from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentSettings, CurrentStorage
from app.api.errors import ApiError, as_api_error, invalid, problem_response
from app.audit.log import AuditedCall
from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.openai.questions import Questions
from app.runs.creating.creation import RunTransaction
from app.runs.creating.serving import ServedModel, find_model, find_or_create_serving_run
from app.runs.events.responses import StreamResponse

if TYPE_CHECKING:  # an API without an engine does not wait for this import
    from app.openai.external_engine import ExternalEngine

router = APIRouter()

_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": (), "logit_bias": ({},), "logprobs": (False,), "metadata": ({},), "modalities": (["text"],),
    "moderation": (), "parallel_tool_calls": (True,), "prediction": (), "presence_penalty": (0,),
    "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "suffix": (), "tool_choice": ("auto",), "top_logprobs": (0,), "user": (),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
"""Parameters of OpenAI that mean nothing here, with the values beside null with which they change nothing."""
_DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI's."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks whether the client still waits for a whole answer."""
_RUN_HEADER = "x-anneal-run"


class AnswerForm(ABC):
    """Form of an answer, whole or in chunks of a stream; collects the pieces that come."""

    prefix: ClassVar[str]
    """Start of the ids of such answers."""
    chunk_object: ClassVar[str]

    def __init__(self, model: str) -> None:
        self.model = model
        self.id = self.prefix + new_id("ans").removeprefix("ans_")
        self.created = int(time.time())
        self.prompt_tokens = self.completion_tokens = 0
        self.choices: dict[int, CollectedChoice] = defaultdict(CollectedChoice)

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece of the answer."""
        choice = self.choices[piece.choice]
        choice.texts.append(piece.text)
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        for call in piece.tool_calls:
            if call.is_continued:
                choice.tool_calls[-1].function.arguments += call.arguments
            else:
                function = FunctionCall(name=call.name, arguments=call.arguments)
                choice.tool_calls.append(ToolCallObject(id=new_id("call"), function=function))
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.completion_tokens += piece.tokens

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return a chunk of a stream as a server-sent event."""
        chunk = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        return _event(to_json({**chunk, "choices": choices, **more}))

    @abstractmethod
    def choice_chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        """Return the choice of the chunk for a piece, which has just been added."""

    @abstractmethod
    def whole(self) -> BaseModel:
        """Return the whole answer."""


@dataclass
class CollectedChoice:
    """Pieces of one choice."""

    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    tool_calls: list[ToolCallObject] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text so far."""
        return "".join(self.texts)


class ChatForm(AnswerForm):
    """Form of an answer to a chat."""

    prefix, chunk_object = "chatcmpl-", "chat.completion.chunk"

    def choice_chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        choice, delta = self.choices[piece.choice], dict[str, Any]()
        if len(choice.texts) == 1:
            delta["role"] = "assistant"
        if piece.text or len(choice.texts) == 1:
            delta["content"] = piece.text
        if choice.tool_calls and piece.finish_reason is not None:  # until then, they may not be complete
            calls = enumerate(call.model_dump(mode="json") for call in choice.tool_calls)
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": piece.finish_reason}

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AnswerMessage(content=choice.text, tool_calls=choice.tool_calls or None),
                finish_reason=choice.finish_reason,
            )
            for index, choice in sorted(self.choices.items())
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage)


class TextForm(AnswerForm):
    """Form of the continuation of a text."""

    prefix, chunk_object = "cmpl-", "text_completion"

    def choice_chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        return {"index": piece.choice, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}

    def whole(self) -> Completion:
        choices = [
            TextChoice(index=index, text=choice.text, finish_reason=choice.finish_reason)
            for index, choice in sorted(self.choices.items())
        ]
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage)


class AnswerCall:
    """Call that asks a question: finds the model, has the engine or a serving run answer, and responds in a form."""

    def __init__(self, request: Request, settings: Settings, storage: Storage, caller_id: str) -> None:
        self._request, self._settings, self._storage, self._caller_id = request, settings, storage, caller_id
        self._run_id: str | None = None
        """Serving run that answers, once it is known; None: an engine does."""

    async def respond(self, body: AnswerRequest, question: Question, form: AnswerForm) -> Response:
        """Respond with the answer. Errors of the first seconds have a status of their own, also of a stream."""
        async with self._request.app.state.sessions() as session:
            model = await find_model(session, self._settings, self._storage, body.model)
        pieces = await self._ask(model, question)
        if not body.stream:
            return await self._respond_whole(pieces, form)
        first = await anext(pieces)
        events = self._stream(first, pieces, form, sends_usage=body.sends_usage)
        cut = ApiError(503, "server_stopping", "The server shuts down in the middle of the answer: ask again.")
        response = StreamResponse(self._request, events, cut=self._error_event(cut))
        response.headers.update(self._run_header)
        return response

    async def _ask(self, model: ServedModel, question: Question) -> AsyncGenerator[AnswerPiece | None, None]:
        """Return the pieces of the answer, of the engine if there is one that can answer, and else of a serving run."""
        state, reason = self._request.app.state, None
        external_engine: ExternalEngine | None = state.external_engine
        if external_engine is not None:
            reason = await external_engine.reason_not_to_answer(model)
            if reason is None:
                return external_engine.answer(model, question, self._caller_id)
        questions: Questions = state.questions
        question = question.model_copy(update={"adapter": model.adapter})
        return questions.answer(question, self._caller_id, partial(self._find_run, model, reason))

    @property
    def _run_header(self) -> dict[str, str]:
        return {} if self._run_id is None else {_RUN_HEADER: self._run_id}

    def _error_event(self, error: ApiError) -> bytes:
        return _event(bytes(problem_response(self._request.scope, error).body))

    async def _find_run(self, model: ServedModel, reason_for_run: str | None) -> str:
        """Return the serving run of a model, which is created if there is none; an audit entry says so.

        If there is an engine, `reason_for_run` says why it does not answer.
        """
        state = self._request.app.state
        async with state.sessions() as session:
            # Of the service itself: all callers share the run, which the quota or budget of one must not hold up.
            transaction = RunTransaction(session, BackgroundTasks())
            try:
                run, is_new = await find_or_create_serving_run(
                    transaction, self._settings, self._storage, model, reason_for_run
                )
            except ApiError as error:
                if error.status == 503 and reason_for_run is not None:
                    error.detail += f" A serving run would have to answer, because {reason_for_run}."
                raise
            run_id: str = run.id
            self._run_id = run_id
            if is_new:
                AuditedCall(self._request.scope).write_entry(session, 200, run_id)
            await session.commit()
        if is_new:
            await state.queue.wake_workers()
        return run_id

    async def _respond_whole(self, pieces: AsyncGenerator[AnswerPiece | None, None], form: AnswerForm) -> Response:
        look_at = time.monotonic() + _LOOK_SECONDS
        async with aclosing(pieces):
            async for piece in pieces:
                if piece is not None:
                    form.add(piece)
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_SECONDS
                    if await self._request.is_disconnected():
                        raise ClientDisconnect
        return Response(to_json(form.whole()), headers=self._run_header, media_type="application/json")

    async def _stream(
        self,
        first: AnswerPiece | None,
        pieces: AsyncGenerator[AnswerPiece | None, None],
        form: AnswerForm,
        *,
        sends_usage: bool,
    ) -> AsyncIterator[bytes]:
        usage = {"usage": None} if sends_usage else {}
        piece: AnswerPiece | None = first
        try:
            async with aclosing(pieces):
                while True:
                    if piece is None:
                        yield b": the model is not ready yet\n\n" if not form.choices else b": keep-alive\n\n"
                    else:
                        form.add(piece)
                        yield form.chunk([form.choice_chunk(piece)], **usage)
                    try:
                        piece = await anext(pieces)
                    except StopAsyncIteration:
                        break
        except Exception as error:
            known = error if isinstance(error, ApiError) else as_api_error(error)
            if known is None:
                raise
            yield self._error_event(known)
            return
        if sends_usage:
            yield form.chunk([], usage=form.usage.model_dump())
        yield _event(b"[DONE]")


async def _answer_call(
    request: Request, settings: CurrentSettings, storage: CurrentStorage, caller: CurrentCaller
) -> AnswerCall:
    return AnswerCall(request, settings, storage, caller.key_id)


Call = Annotated[AnswerCall, Depends(_answer_call)]


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "headers": {_RUN_HEADER: {"description": "Serving run that answers, if any.", "schema": {"type": "string"}}},
    },
    404: {"description": "There is no such model."},
    429: {"description": "The model or this key has too many open questions, or this key too many open streams."},
    503: {"description": "No worker can answer, for the reason in the message, or the answer was interrupted."},
}


@router.post("/chat/completions", response_model=ChatCompletion, responses=_RESPONSES)
async def create_chat_completion(body: ChatRequest, call: Call) -> Response:
    """Answer a chat with a base model, the output of a run or a checkpoint.

    A serving run (`GET /v1/runs?task=serve`) answers. The first question to a base model creates it, and models that
    are adapters on that base share it. It ends when no question has come for `ANNEAL_SERVE_IDLE_SECONDS`, or when
    another run waits for its device. Until the model is loaded, a streamed answer consists of comments. If the operator
    has set `ANNEAL_ENGINE_URL`, that engine answers for the base models that it serves, and for adapters on them.
    """
    _refuse_unsupported(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise _parameter_error("max_tokens", "invalid", "is the older name of `max_completion_tokens`; leave it out")
    question = _question(
        body,
        messages=[_plain_message(message) for message in body.messages],
        tools=[tool.model_dump(mode="json", exclude_none=True) for tool in body.tools or ()] or None,
        max_tokens=body.max_completion_tokens or body.max_tokens,
    )
    return await call.respond(body, question, ChatForm(body.model))


@router.post("/completions", response_model=Completion, responses=_RESPONSES)
async def create_completion(body: CompletionRequest, call: Call) -> Response:
    """Continue a text with a base model, the output of a run or a checkpoint; a serving run answers, as for a chat."""
    _refuse_unsupported(body)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        if len(prompt) != 1:
            raise _parameter_error("prompt", "invalid", "must be one text or its tokens; send a request for each text")
        prompt = prompt[0]
    question = _question(body, prompt=prompt, max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS)
    return await call.respond(body, question, TextForm(body.model))


def _question(body: AnswerRequest, **values: Any) -> Question:
    return Question(
        id="",  # each run that it is sent to gets another one
        created_at=time.time(),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stop_texts,
        seed=body.seed,
        n=body.n or 1,
        **values,
    )


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message with its content as one text, as chat templates take it."""
    plain = message.model_dump(mode="json", exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    return plain


def _refuse_unsupported(body: AnswerRequest) -> None:
    """Refuse parameters of OpenAI that are not supported, unless they change nothing, and those that it has not."""
    for name, value in (body.model_extra or {}).items():
        if name not in _UNSUPPORTED:
            raise _parameter_error(name, "unknown_parameter", "is not a parameter of this call; leave it out")
        if value is not None and not any(_is_same(value, default) for default in _UNSUPPORTED[name]):
            raise _parameter_error(name, "unsupported_parameter", "is not supported with this value; leave it out")


def _is_same(value: Any, default: Any) -> bool:
    # In Python, true equals 1.
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _parameter_error(name: str, code: str, message: str) -> ApiError:
    return invalid([FieldError(field=name, code=code, message=message)], code=code)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

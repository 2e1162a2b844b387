"""External engine, such as vLLM, that answers in place of serving runs (`ANNEAL_ENGINE_URL`).

It answers for the base models that it serves, and for adapters on them, which it loads from the storage at the first
question. An engine forgets its adapters when it starts again, so one that it does not know is loaded again.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import EventSource
from pydantic import BaseModel

from anneal.contracts.attempt.answers import AnswerPiece, Question
from app.api.errors import ApiError
from app.config import Settings
from app.infra import async_tasks
from app.infra.ids import is_id, new_id
from app.infra.internal_http import internal_client
from app.infra.logs.redaction import redact_secrets
from app.infra.storage import Storage
from app.infra.terminal_text import plain_line
from app.openai.engine_chunks import ChunkReader, ErrorBody, ErrorChunk
from app.openai.questions import (
    MOST_OPEN,
    NO_RETRY,
    RETRY,
    answer_interrupted,
    next_arrival,
    refuse_too_many,
)
from app.runs.creating.serving import ServedModel

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
_LIST_SECONDS = 10.0
_LOAD_SECONDS = 120.0
SILENCE_SECONDS = 300.0
"""Seconds in which a piece of an answer must come; the prompt may wait behind others."""
FRESH_SECONDS = 10.0
"""Seconds for which the list of models is not asked for again."""
_FAILED_SECONDS = 1.0
"""Seconds for which all questions get the error of one attempt to list them."""
_MOST_CHARACTERS = 500

_NOT_APPLIED = frozenset(
    {"use_dora", "modules_to_save", "chat_template", "tokenizer", "extra.tokenizer", "extra.model_factory"}
)
"""Fields of a run whose adapter an engine does not load, or would apply to another model or prompt than was trained."""


class _Card(BaseModel):
    id: str
    parent: str | None = None
    """Base model of an adapter."""


class _Cards(BaseModel):
    data: list[_Card]


@dataclass(frozen=True)
class _Models:
    """Names that the engine knows."""

    bases: frozenset[str]
    adapters: frozenset[str]


class ExternalEngine:
    """Connection of this API process to the engine."""

    def __init__(self, settings: Settings, storage: Storage) -> None:
        self._settings, self._storage = settings, storage
        # Clients of OpenAI have the version in their URL.
        url = (settings.engine_url or "").rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=_CONNECT_SECONDS)
        self._http = internal_client(url, settings.engine_api_key, timeout)
        self._open: dict[str, tuple[str, int]] = {}
        """Caller and number of choices of each open question."""
        self._models: _Models | ApiError = _unavailable("it has not listed its models yet")
        self._list_again_at = 0.0
        self._list_lock = asyncio.Lock()
        self._load_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def forget_models(self) -> None:
        """Let the engine list its models for the next question."""
        self._list_again_at = 0.0

    async def reason_not_to_answer(self, model: ServedModel) -> str | None:
        """Return why a serving run has to answer for a model, as a clause; None if the engine does.

        Raises:
            ApiError: 503, because the engine cannot be asked which models it serves.
        """
        if model.weights is not None:
            return f"{model.weights} is no adapter that an engine loads"
        if fields := sorted(_NOT_APPLIED & model.adapter_fields):
            return f"{model.adapter} was trained with `{fields[0]}`, which an engine does not apply"
        if "extra.checkpoint_engine" in model.adapter_fields and is_id(model.adapter or "", "ckpt"):
            return f"{model.adapter} may be in a checkpoint engine alone"
        if model.adapter is not None and self._storage.objects is not None and self._settings.engine_storage is None:
            return f"{model.adapter} is in an object store, and ANNEAL_ENGINE_STORAGE is not set"
        if (name := _base_name(model)) not in (await self._list_models()).bases:
            return f"the engine does not serve {name}"
        return None

    async def answer(
        self, model: ServedModel, question: Question, caller_id: str
    ) -> AsyncGenerator[AnswerPiece | None, None]:
        """Yield the pieces of the answer, or None after each `KEEP_ALIVE_SECONDS` of silence.

        The request to the engine is closed with the generator, and the engine then computes no further.

        Raises:
            ApiError: 429 for too many questions; 400 or 503 with what the engine says, or that it says nothing.
        """
        refuse_too_many(self._open.values(), caller_id, question.n, MOST_OPEN)
        id, remaining = new_id("ask"), question.n
        arrivals: asyncio.Queue[AnswerPiece | Exception] = asyncio.Queue()
        self._open[id] = (caller_id, question.n)
        reading = asyncio.create_task(self._read_answer(model, question, arrivals))
        try:
            while remaining:
                piece = await next_arrival(arrivals)
                remaining -= piece is not None and piece.finish_reason is not None
                yield piece
        finally:
            del self._open[id]
            await async_tasks.cancel_and_wait(reading)

    async def _read_answer(
        self, model: ServedModel, question: Question, arrivals: asyncio.Queue[AnswerPiece | Exception]
    ) -> None:
        """Put all pieces into `arrivals`, or the error that ends the wait for them."""
        has_started = False
        try:
            async for piece in self._request_answer(model, question):
                has_started = True
                arrivals.put_nowait(piece)
        except httpx.HTTPError as error:
            log.warning("the engine has not answered a question: %s", _describe(error))
            arrivals.put_nowait(answer_interrupted() if has_started else _unavailable(_describe(error)))
        except ErrorChunk as chunk:
            arrivals.put_nowait(self._question_error(chunk.error.code, chunk.error.message, chunk.error.param))
        except ValueError as error:
            log.warning("the engine has sent an invalid answer: %s", error)
            arrivals.put_nowait(answer_interrupted())
        except Exception as error:  # otherwise the question would wait for ever
            arrivals.put_nowait(error)

    async def _request_answer(self, model: ServedModel, question: Question) -> AsyncGenerator[AnswerPiece, None]:
        path = "/v1/chat/completions" if question.prompt is None else "/v1/completions"
        body = _request_body(model, question)
        for is_last_try in (False, True):
            if model.adapter is not None and model.adapter_folder is not None:
                await self._load_adapter(_base_name(model), model.adapter, model.adapter_folder)
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_success:
                    reader = ChunkReader(question.n)
                    async for event in EventSource(response).aiter_sse():
                        if event.data != "[DONE]":
                            for piece in reader.read_chunk(event.data):
                                yield piece
                    yield reader.read_end()
                    return
                error = self._parse_error(await response.aread())
            if response.status_code == 404:
                self.forget_models()  # it was started again
            if response.status_code != 404 or is_last_try:
                raise self._question_error(response.status_code, *error)

    async def _load_adapter(self, base: str, adapter: str, folder: Path) -> None:
        """Let the engine load an adapter, unless it has it.

        Raises:
            ApiError: 503, because it cannot.
        """
        async with self._load_locks[adapter]:
            models = await self._list_models()
            if base not in models.bases:  # an adapter may fit another base model, and answer nonsense on it
                raise _unavailable(f"it does not serve {base} any more")
            if adapter in models.adapters:
                return
            body = {"lora_name": adapter, "lora_path": str(self._engine_folder(folder))}
            response = await self._http.post("/v1/load_lora_adapter", json=body, timeout=_LOAD_SECONDS)
            self.forget_models()
            if not response.is_success and adapter not in (await self._list_models()).adapters:
                raise self._adapter_error(adapter, response)  # nor has another API process loaded it meanwhile

    def _engine_folder(self, folder: Path) -> Path:
        """Return a folder of the storage as the engine sees it."""
        root = self._settings.engine_storage
        return folder if root is None else root / folder.relative_to(self._storage.root)

    async def _list_models(self) -> _Models:
        """Return the models of the engine, as it has listed them a short time ago."""
        async with self._list_lock:
            if time.monotonic() >= self._list_again_at:
                try:
                    self._models, fresh_seconds = await self._request_models(), FRESH_SECONDS
                except ApiError as error:
                    log.warning("the engine does not list its models: %s", error.detail)
                    self._models, fresh_seconds = error, _FAILED_SECONDS
                self._list_again_at = time.monotonic() + fresh_seconds
        if isinstance(self._models, _Models):
            return self._models
        # Not the stored one, which would collect the tracebacks of all questions.
        raise ApiError(self._models.status, self._models.code, self._models.detail, headers=self._models.headers)

    async def _request_models(self) -> _Models:
        try:
            response = await self._http.get(
                "/v1/models", timeout=httpx.Timeout(_LIST_SECONDS, connect=_CONNECT_SECONDS)
            )
            if not response.is_success:
                raise self._server_error(response.status_code, self._plain(self._parse_error(response.content)[0]))
            cards = _Cards.model_validate_json(response.content).data
        except httpx.HTTPError as error:
            raise _unavailable(_describe(error)) from error
        except ValueError as error:
            raise _unavailable("it lists its models in another form than OpenAI's API") from error
        bases = frozenset(card.id for card in cards if card.parent is None)
        return _Models(bases, frozenset(card.id for card in cards) - bases)

    def _parse_error(self, body: bytes) -> tuple[str, str | None]:
        """Return the message and the parameter of an error response."""
        try:
            error = ErrorBody.model_validate_json(body).error
        except ValueError:
            return body.decode(errors="replace"), None
        return error.message, error.param

    def _question_error(self, status: int | str | None, message: str, param: str | None) -> ApiError:
        """Return the error of a question to which the engine has responded with an error."""
        text = self._plain(message)
        if status in (400, 422):
            if param == "input_tokens" or "maximum context length" in text:
                return ApiError(400, "context_length_exceeded", f"The prompt is too long for the engine: {text}.")
            return ApiError(400, "invalid_prompt", f"The engine refuses the question: {text}. Change it.")
        return self._server_error(status, text)

    def _server_error(self, status: int | str | None, text: str) -> ApiError:
        """Return the error of a question for which the engine, or its operator, is to blame."""
        log.warning("the engine responds with %s: %s", status, text)
        if status in (401, 403):
            return _unavailable(f"it rejects the key of the server ({status}): the operator sets ANNEAL_ENGINE_API_KEY")
        if status in (429, 503):
            return _unavailable(f"it takes no questions ({status}: {text})")
        return ApiError(503, "engine_failed", f"The engine has failed ({status}: {text}): ask again.", headers=RETRY)

    def _adapter_error(self, adapter: str, response: httpx.Response) -> ApiError:
        """Return the error of a question to an adapter that the engine has not loaded."""
        text = self._plain(self._parse_error(response.content)[0])
        log.warning("the engine does not load %s: %s %s", adapter, response.status_code, text)
        if response.status_code in (401, 403):
            return self._server_error(response.status_code, text)
        if response.status_code != 404:
            why = f"{text}. The operator changes its options, such as `--enable-lora` and `--max-lora-rank`"
        elif adapter in text:
            why = "it does not see the folder. The operator mounts the storage for it, and sets ANNEAL_ENGINE_STORAGE"
        else:
            why = "it loads no adapters while it runs. The operator sets VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for it"
        return ApiError(503, "adapter_not_loaded", f"The engine has not loaded {adapter}: {why}.", headers=NO_RETRY)

    def _plain(self, text: str) -> str:
        """Return a message of the engine as one short line, without secrets and the place of the storage."""
        for secret, shown in (
            (self._settings.engine_api_key, "[redacted]"),
            (str(self._settings.engine_storage or self._storage.root), "ANNEAL_STORAGE"),
        ):
            text = text.replace(secret, shown) if secret else text
        return plain_line(redact_secrets(text))[:_MOST_CHARACTERS].strip().rstrip(".")


def _base_name(model: ServedModel) -> str:
    """Return the name under which the engine has to serve the base of a model."""
    revision: Any = model.config.get("revision")
    return str(model.config["base_model"]) + (f"@{revision}" if revision else "")


def _request_body(model: ServedModel, question: Question) -> dict[str, Any]:
    body = question.model_dump(mode="json", exclude_none=True, exclude={"id", "created_at", "adapter"})
    for message in body.get("messages", ()):
        if message["role"] == "developer":  # many chat templates leave out messages of a role that they do not know
            message["role"] = "system"
    name = model.adapter or _base_name(model)
    return {**body, "model": name, "stream": True, "stream_options": {"include_usage": True}}


def _describe(error: httpx.HTTPError) -> str:
    """Return a clause that says why the engine has not responded."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"it cannot be reached ({error or type(error).__name__})"
    if isinstance(error, httpx.TimeoutException):
        return "it has not responded in time"
    return f"it has broken the connection ({error or type(error).__name__})"


def _unavailable(why: str) -> ApiError:
    message = f"The engine that answers for this server cannot be used now: {why}. Ask again later."
    return ApiError(503, "engine_unavailable", message, headers=RETRY)

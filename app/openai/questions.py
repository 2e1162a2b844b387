"""Questions of this API process to serving runs: sent through Redis, and answered piece by piece."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.attempt.answers import AnswerError, AnswerPiece, Question
from anneal.contracts.run_status import TERMINAL
from app.api.errors import RETRY_SECONDS, ApiError
from app.config import Settings
from app.infra import async_tasks
from app.infra.ids import new_id
from app.infra.question_streams import (
    ATTEMPT,
    CANCEL,
    PIECES,
    QUESTION,
    QUESTION_SECONDS,
    REPLY,
    REPLY_SECONDS,
    TAKEN,
    alive_key,
    answers_stream,
    questions_stream,
)
from app.tables.runs import Run

log = logging.getLogger(__name__)

MOST_OPEN = 256
"""Open answers of this process by one serving run, of which each choice counts; the next question is refused."""
_SHARE = 4
"""A key has at most this part of them, so that others are answered too."""
_PENDING_SECONDS = 60.0
"""Seconds for which a question waits for a run that is pending; callers have timeouts, and should know why."""
_UNSERVED_SECONDS = 15.0
"""Seconds for which it waits for the worker of a running run; a relay that is restarted is back before."""
KEEP_ALIVE_SECONDS = 5.0
_BLOCK_MS = 1000
_WATCH_SECONDS = 1.0
_RENEW_SECONDS = REPLY_SECONDS / 3
_LOST_LOOKS = 2
"""Looks at a run, one after the other, at which a question must be lost: its last pieces may still be on their way."""
_TRIES = 4
"""Serving runs that a question is sent to before it is given up: each has ended before its first answer."""
_REDIS_SECONDS = 10.0
"""Seconds for which a question waits for Redis."""
_WAITS = ("reserved", "quota", "devices_paused")
"""Reasons for which a run waits that pass by themselves."""
RETRY = {"Retry-After": str(RETRY_SECONDS), "x-should-retry": "true"}
NO_RETRY = {"x-should-retry": "false"}
_STATUS = {"context_length_exceeded": 400, "invalid_prompt": 400, "tools_not_supported": 400, "internal": 500}
"""Status of an error of the engine; 503 for the others, which are about the model and its device."""


class AskAgain(Exception):
    """The question will not be answered, and nothing of an answer has come: it can be asked again."""


@dataclass
class _OpenQuestion:
    """Question that this process waits for."""

    id: str
    run_id: str
    caller_id: str
    choices: int
    arrivals: asyncio.Queue[AnswerPiece | Exception] = field(default_factory=asyncio.Queue)
    entry_id: str = ""
    """Entry in the stream of the run."""
    attempt: int | None = None
    """Attempt of the run that has taken it."""
    is_started: bool = False
    """True once a piece of its answer has come."""
    lost_looks: int = 0
    pending_since: float | None = None
    """Monotonic time since which its run is pending."""
    unserved_since: float | None = None
    """Monotonic time since which no worker takes questions of its run, which is running."""

    def lose(self) -> None:
        """End the wait for an answer that will not come."""
        self.arrivals.put_nowait(answer_interrupted() if self.is_started else AskAgain())


class Questions:
    """Open questions of this API process; a reader of their answers and a watch of their runs work while there are any.

    A worker or Redis that is lost and a run that ends are noticed within seconds: a question without a first
    piece is then asked again, any other ends with an error.
    """

    def __init__(
        self, settings: Settings, sessions: async_sessionmaker[AsyncSession], most_open: int = MOST_OPEN
    ) -> None:
        self.most_open = most_open
        self._sessions = sessions
        self._redis: Redis = Redis.from_url(
            settings.redis_url or "",
            socket_connect_timeout=2,
            socket_timeout=5,
            decode_responses=True,
            encoding_errors="replace",  # of whatever others publish
        )
        self._replies = answers_stream(new_id("api"))
        self._open: dict[str, _OpenQuestion] = {}
        self._has_open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the tasks, which sleep while there is no question."""
        self._spawn(self._read_answers())
        self._spawn(self._watch_runs())

    async def stop(self) -> None:
        """End the tasks."""
        for task in list(self._tasks):
            await async_tasks.cancel_and_wait(task)
        await self._redis.aclose()

    async def answer(
        self, question: Question, caller_id: str, find_run: Callable[[], Awaitable[str]]
    ) -> AsyncGenerator[AnswerPiece | None, None]:
        """Yield the pieces of the answer, or None after each `KEEP_ALIVE_SECONDS` of silence.

        `find_run` returns the serving run to ask, and is called again if that ends before it answers.

        Raises:
            ApiError: 429 if the run has too many questions, of all callers or of this one, 503 if it ends, cannot start
                or waits too long, or what the engine says.
        """
        for _ in range(_TRIES):
            open_question = await self._ask(await find_run(), caller_id, question)
            remaining = question.n
            try:
                while remaining:
                    piece = await next_arrival(open_question.arrivals)
                    if piece is not None and piece.error is not None:
                        remaining = 0
                        raise _error_of_engine(piece.error)
                    remaining -= piece is not None and piece.finish_reason is not None
                    yield piece
            except AskAgain:
                continue
            finally:
                self._forget(open_question, is_cancelled=remaining > 0)
            return
        raise ApiError(
            503,
            "serving_failed",
            f"{_TRIES} serving runs of the model have ended before they answered: GET /v1/runs lists them.",
            headers=NO_RETRY,
        )

    async def _ask(self, run_id: str, caller_id: str, question: Question) -> _OpenQuestion:
        open_choices = [(it.caller_id, it.choices) for it in self._open.values() if it.run_id == run_id]
        refuse_too_many(open_choices, caller_id, question.n, self.most_open)
        open_question = _OpenQuestion(new_id("ask"), run_id, caller_id, question.n)
        sent = question.model_copy(update={"id": open_question.id}).model_dump_json(exclude_defaults=True)
        self._open[open_question.id] = open_question
        self._has_open.set()
        try:
            open_question.entry_id = await self._send(run_id, sent)
        except BaseException:
            self._open.pop(open_question.id, None)
            raise
        return open_question

    async def _send(self, run_id: str, question: str) -> str:
        """Send a question; return its entry in the stream of the run."""
        stream, until = questions_stream(run_id), time.monotonic() + _REDIS_SECONDS
        while True:
            try:
                async with self._redis.pipeline(transaction=True) as pipeline:
                    pipeline.xadd(self._replies, {REPLY: ""})  # workers answer in no stream that does not exist
                    pipeline.expire(self._replies, REPLY_SECONDS)
                    pipeline.xadd(stream, {QUESTION: question, REPLY: self._replies})
                    pipeline.expire(stream, QUESTION_SECONDS)
                    _, _, entry_id, _ = await pipeline.execute()
                return str(entry_id)
            except (RedisError, OSError) as error:
                if time.monotonic() > until:
                    log.warning("a question cannot be sent: %s", error)
                    raise _redis_unavailable() from error
                await asyncio.sleep(_WATCH_SECONDS / 2)

    def _forget(self, open_question: _OpenQuestion, *, is_cancelled: bool) -> None:
        self._open.pop(open_question.id, None)
        if is_cancelled:
            # In a task of its own: the caller may be cancelled just now, because its client is gone.
            self._spawn(self._cancel(open_question))

    async def _cancel(self, open_question: _OpenQuestion) -> None:
        """Remove a question that was not taken; otherwise free its place in the batch."""
        stream = questions_stream(open_question.run_id)
        try:
            if not await self._redis.xdel(stream, open_question.entry_id):
                await self._redis.xadd(stream, {CANCEL: open_question.id}, nomkstream=True)
        except (RedisError, OSError) as error:
            log.info("a question is not cancelled, so that its answer is written to its end: %s", error)

    async def _read_answers(self) -> None:
        last, renew_at = "0", 0.0
        while True:
            if not self._has_open.is_set():
                await self._has_open.wait()
                renew_at = time.monotonic() + _RENEW_SECONDS
                last = "0"  # the stream may be a new one, with smaller ids if the clock of Redis was set back
            try:
                if time.monotonic() >= renew_at:
                    renew_at = time.monotonic() + _RENEW_SECONDS
                    if not await self._redis.expire(self._replies, REPLY_SECONDS):
                        self._lose_all()  # without the stream, workers take this process for lost
                    await self._redis.xtrim(self._replies, minid=last)
                read: Any = await self._redis.xread({self._replies: last}, count=500, block=_BLOCK_MS)
                for entry_id, fields in (entry for _, entries in read for entry in entries):
                    last = entry_id
                    self._take_entry(fields)
            except (RedisError, OSError) as error:
                log.warning("answers do not arrive: %s", error)
                self._lose_all()  # pieces may be lost with the server, and nothing would say so
                await asyncio.sleep(_WATCH_SECONDS)
            except Exception:  # without this task, every question would wait for ever
                log.exception("an entry of the answers is dropped")
            if not self._open:
                self._has_open.clear()

    def _lose_all(self) -> None:
        for open_question in list(self._open.values()):
            if open_question.entry_id:
                open_question.lose()

    def _take_entry(self, fields: Mapping[str, str]) -> None:
        if TAKEN in fields and (open_question := self._open.get(fields[TAKEN])) is not None:
            open_question.attempt = int(fields[ATTEMPT])
        for piece in json.loads(fields.get(PIECES, "[]")):
            if (open_question := self._open.get(piece["question_id"])) is not None:
                open_question.is_started = True
                try:
                    open_question.arrivals.put_nowait(AnswerPiece.model_validate(piece))
                except ValidationError as error:  # without the piece, the answer would be wrong, or have no end
                    log.warning("a piece of an answer of %s is invalid: %s", open_question.run_id, error)
                    open_question.arrivals.put_nowait(_piece_not_understood(open_question.run_id))

    async def _watch_runs(self) -> None:
        """Look at the runs of open questions: one that ends or is lost answers no more."""
        while True:
            await self._has_open.wait()
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self._look_at_runs()
            except (RedisError, OSError, SQLAlchemyError) as error:
                log.info("serving runs are not watched for now: %s", error)
            except Exception:
                log.exception("the watch of serving runs failed, trying again")

    async def _look_at_runs(self) -> None:
        run_ids = sorted({open_question.run_id for open_question in self._open.values() if open_question.entry_id})
        if not run_ids:
            return
        alive = await self._redis.mget([alive_key(run_id) for run_id in run_ids])
        is_alive = {run_id: value is not None for run_id, value in zip(run_ids, alive, strict=True)}
        columns = (Run.id, Run.status, Run.attempt, Run.pending_reason, Run.stop_requested_at, Run.error_message)
        async with self._sessions() as session:
            runs = {row.id: row for row in await session.execute(select(*columns).where(Run.id.in_(run_ids)))}
        for open_question in list(self._open.values()):
            if open_question.run_id in is_alive and open_question.entry_id:
                self._judge(open_question, runs.get(open_question.run_id), is_alive=is_alive[open_question.run_id])

    def _judge(self, open_question: _OpenQuestion, run: Any, *, is_alive: bool) -> None:
        """End the wait for a question that its run will not answer."""
        if run is None or is_lost(open_question.attempt, run, is_alive=is_alive):
            open_question.lost_looks += 1
            if open_question.lost_looks >= _LOST_LOOKS:
                open_question.lose()
            return
        open_question.lost_looks = 0
        if (error := _reason_not_to_wait(run) or _waited_too_long(open_question, run, is_alive=is_alive)) is not None:
            open_question.arrivals.put_nowait(error)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def next_arrival(arrivals: asyncio.Queue[AnswerPiece | Exception]) -> AnswerPiece | None:
    """Return the next piece, or None after `KEEP_ALIVE_SECONDS` of silence; raise an exception that has arrived."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
            arrival = await arrivals.get()
    except TimeoutError:
        return None
    if isinstance(arrival, Exception):
        raise arrival
    return arrival


def refuse_too_many(open_choices: Iterable[tuple[str, int]], caller_id: str, choices: int, most_open: int) -> None:
    """Raise 429 if a question with this number of choices is too much beside those that are open, by their caller.

    The first question never is, of all callers or of this one.
    """
    open_choices = list(open_choices)
    of_all = sum(number for _, number in open_choices)
    of_caller = sum(number for caller, number in open_choices if caller == caller_id)
    share = max(most_open // _SHARE, 1)
    if of_all and of_all + choices > most_open:
        message = f"The model has {of_all:,} open answers, of at most {most_open:,}: ask again when some end."
        raise ApiError(429, "too_many_questions", message, headers=RETRY)
    if of_caller and of_caller + choices > share:
        message = f"This key has {of_caller:,} open answers of the model, of at most {share:,}: ask when some end."
        raise ApiError(429, "too_many_questions", message, headers=RETRY)


def is_lost(attempt: int | None, run: Any, *, is_alive: bool) -> bool:
    """Return True if a question to a run, taken by this attempt of it if by any, will not be answered."""
    if run.status == "completed":
        return True
    if attempt is None or run.status in TERMINAL:
        return False
    return run.attempt != attempt or run.status == "pending" or not is_alive


def _reason_not_to_wait(run: Any) -> ApiError | None:
    """Return the error of questions to a run that was stopped, has failed, or cannot start."""
    if run.stop_requested_at is not None or run.status == "cancelled":
        message = f"Serving run {run.id} was stopped; the next question to the model starts another one."
        return ApiError(503, "serving_stopped", message, headers=NO_RETRY)
    if run.status == "failed":
        message = f"Serving run {run.id} has failed: {run.error_message} `anneal runs why {run.id}` says more."
        return ApiError(503, "serving_failed", message, headers=NO_RETRY)
    reason = run.pending_reason
    if run.status == "pending" and reason is not None and reason["code"] not in _WAITS:
        return ApiError(503, reason["code"], reason["message"], headers=RETRY)
    return None


def _waited_too_long(open_question: _OpenQuestion, run: Any, *, is_alive: bool) -> ApiError | None:
    """Return the error of a question whose run waits behind others, or is running on a worker that is away."""
    now = time.monotonic()
    if run.status != "pending":
        open_question.pending_since = None
    elif open_question.pending_since is None:
        open_question.pending_since = now
    elif now - open_question.pending_since > _PENDING_SECONDS:
        if run.pending_reason is not None:
            return ApiError(503, "serving_waits", run.pending_reason["message"], headers=RETRY)
        message = f"Serving run {run.id} waits for a device: `anneal runs list` shows what comes before it; ask later."
        return ApiError(503, "serving_waits", message, headers=RETRY)
    if run.status != "running" or is_alive or open_question.attempt is not None:
        open_question.unserved_since = None
    elif open_question.unserved_since is None:
        open_question.unserved_since = now
    elif now - open_question.unserved_since > _UNSERVED_SECONDS:
        message = f"The worker of serving run {run.id} takes no questions now: ask again."
        return ApiError(503, "serving_lost", message, headers=RETRY)
    return None


def _error_of_engine(error: AnswerError) -> ApiError:
    return ApiError(_STATUS.get(error.code, 503), error.code, error.message)


def _piece_not_understood(run_id: str) -> ApiError:
    message = f"The worker of serving run {run_id} answers in another form than this server reads: install one version."
    return ApiError(503, "serving_failed", message, headers=NO_RETRY)


def answer_interrupted() -> ApiError:
    """Create the error of an answer whose process was lost in the middle of it."""
    message = "The process that wrote the answer was lost before its end: ask again."
    return ApiError(503, "answer_interrupted", message, headers=RETRY)


def _redis_unavailable() -> ApiError:
    message = f"Questions cannot be sent, because Redis does not answer; try again in {RETRY_SECONDS} seconds."
    return ApiError(503, "redis_unavailable", message, headers=RETRY)

"""Retries of OpenAI's clients, which send the same request again after a timeout or an error of the server.

They send no idempotency key, but `x-stainless-retry-count`: 0 for a new request, then 1, 2 … So the service gives each
new request a key of its own, under the digest of the request, and a retry finds the key of the newest request with its
digest. The unique keys of runs and datasets then allow one result. A request whose response has arrived is not what a
retry repeats: the first attempt of that one has not arrived.
"""

from datetime import timedelta

from fastapi import Request
from sqlalchemy import ColumnElement, and_, delete, func, or_, update
from sqlalchemy.dialects.postgresql import insert
from starlette.background import BackgroundTasks
from starlette.datastructures import Headers

from app.api.idempotency import Idempotency, request_digest
from app.infra.ids import new_id
from app.tables.openai_requests import OpenAIRequest

RETRIES_END = timedelta(hours=1)
"""Time after an attempt in which the next one has arrived: by default a client waits ten minutes for a response, and
large bodies take long."""
_LOST_ANSWER = timedelta(minutes=1)
"""Time in which a client repeats a request after it has noticed that there will be no response."""
_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""Headers with the seconds of silence after which a client gives an attempt up, in Python and for Node."""


async def find_idempotency(
    request: Request,
    caller_id: str,
    call: str,
    content: bytes,
    after_response: BackgroundTasks,
    body_seconds: float = 0.0,
) -> Idempotency | None:
    """Return the idempotency of a request: by its `Idempotency-Key`, or that of the request which it repeats.

    `after_response` gets the task that records the response; the body has taken `body_seconds` to arrive. None for
    clients that do not say whether they repeat a request.
    """
    headers = request.headers
    if "idempotency-key" in headers:
        return Idempotency.from_header(headers["idempotency-key"], call, content)
    if "x-stainless-retry-count" not in headers:
        return None
    digest = request_digest(call, content)
    key = await _repeated_key(request, caller_id, digest, body_seconds) if is_retry(request) else None
    key = key or await _store_key(request, caller_id, digest)
    after_response.add_task(_record_answer, request, caller_id, digest, key)
    return Idempotency(key, digest)


def is_retry(request: Request) -> bool:
    """Return True if a client of OpenAI repeats a request."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


async def _repeated_key(request: Request, caller_id: str, digest: str, body_seconds: float) -> str | None:
    """Return the key of the request that a retry repeats, which is unanswered again; None if there is none."""
    may_be_repeated = _may_be_repeated(timedelta(seconds=body_seconds), _timeout_of(request.headers))
    repeated = update(OpenAIRequest).where(
        OpenAIRequest.created_by == caller_id, OpenAIRequest.digest == digest, may_be_repeated
    )
    again = repeated.values(arrived_at=func.now(), answered_at=None).returning(OpenAIRequest.idempotency_key)
    async with request.app.state.sessions() as session, session.begin():
        key: str | None = await session.scalar(again)
    return key


def _may_be_repeated(body: timedelta, timeout: timedelta | None) -> ColumnElement[bool]:
    """Build the condition that a retry, whose body has taken so long to arrive, may repeat a request.

    It has no response, or one that the client has noticed to be lost, or has waited for until its timeout.
    """
    began, arrived_at, answered_at = func.now() - body, OpenAIRequest.arrived_at, OpenAIRequest.answered_at
    conditions = [answered_at.is_(None), answered_at > began - _LOST_ANSWER]
    if timeout is not None:
        # `arrived_at` is the end of the body of the attempt before: there the timeout begins in Python, and for Node at
        # the start of the body.
        earliest, latest = began - timeout - _LOST_ANSWER, began - timeout + body + _LOST_ANSWER
        conditions.append(arrived_at.between(earliest, latest))
    return and_(arrived_at > began - RETRIES_END, or_(*conditions))


def _timeout_of(headers: Headers) -> timedelta | None:
    sent = next((headers[name] for name in _TIMEOUTS if name in headers), "")
    try:
        seconds = float(sent)
    except ValueError:
        return None
    return timedelta(seconds=seconds) if 0 < seconds < RETRIES_END.total_seconds() else None


async def _store_key(request: Request, caller_id: str, digest: str) -> str:
    """Store a new key for the newest request with this digest, and return it."""
    new_key = new_id("req")
    changed = {"idempotency_key": new_key, "arrived_at": func.now(), "answered_at": None}
    statement = insert(OpenAIRequest).values(created_by=caller_id, digest=digest, idempotency_key=new_key)
    async with request.app.state.sessions() as session, session.begin():
        await session.execute(delete(OpenAIRequest).where(OpenAIRequest.arrived_at < func.now() - RETRIES_END))
        keys = ["created_by", "digest"]
        await session.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))
    return new_key


async def _record_answer(request: Request, caller_id: str, digest: str, key: str) -> None:
    # Not of a later request with the same content, which has another key and may still be unanswered.
    answered = update(OpenAIRequest).where(
        OpenAIRequest.created_by == caller_id, OpenAIRequest.digest == digest, OpenAIRequest.idempotency_key == key
    )
    async with request.app.state.sessions() as session, session.begin():
        await session.execute(answered.values(answered_at=func.now()))

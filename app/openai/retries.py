"""Retries of OpenAI's clients, which send the same request again after a timeout or an error of the server.

They send no idempotency key, but `x-stainless-retry-count`: 0 for a new request, then 1, 2 … So the service gives each
new request a key of its own, under the digest of the request, and a retry finds the key of the newest request with its
digest. The unique keys of runs and datasets then allow one result. A request that was answered long before is not what
a retry repeats: the first attempt of that one has not arrived.
"""

from datetime import timedelta

from fastapi import Request
from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from starlette.background import BackgroundTasks

from app.api.idempotency import Idempotency, request_digest
from app.infra.ids import new_id
from app.tables.openai_requests import OpenAIRequest

_RETRIES_END = timedelta(minutes=30)
"""Time after which a client has made its last retry: by default two, each ten minutes after the attempt before."""


_LOST_ANSWER = timedelta(minutes=1)
"""Time in which a client notices that it has lost the response and repeats the request."""


async def find_idempotency(
    request: Request, caller_id: str, call: str, content: bytes, after_response: BackgroundTasks
) -> Idempotency | None:
    """Return the idempotency of a request: by its `Idempotency-Key`, or that of the request which it repeats.

    `after_response` gets the task that records the response. None for clients that do not say whether they repeat a
    request.
    """
    headers = request.headers
    if "idempotency-key" in headers:
        return Idempotency.from_header(headers["idempotency-key"], call, content)
    count = headers.get("x-stainless-retry-count")
    if count is None:
        return None
    digest = request_digest(call, content)
    key = await _key_of_request(request, caller_id, digest, is_retry=count != "0")
    after_response.add_task(_record_answer, request, caller_id, digest)
    return Idempotency(key, digest)


async def _record_answer(request: Request, caller_id: str, digest: str) -> None:
    async with request.app.state.sessions() as session, session.begin():
        answered = update(OpenAIRequest).where(OpenAIRequest.created_by == caller_id, OpenAIRequest.digest == digest)
        await session.execute(answered.values(answered_at=func.now()))


async def _key_of_request(request: Request, caller_id: str, digest: str, *, is_retry: bool) -> str:
    """Return the key of the newest request with this digest for a retry; otherwise store and return a new one."""
    new_key = new_id("req")
    row = {"created_by": caller_id, "digest": digest, "idempotency_key": new_key}
    oldest = func.now() - _RETRIES_END
    async with request.app.state.sessions() as session, session.begin():
        await session.execute(delete(OpenAIRequest).where(OpenAIRequest.arrived_at < oldest))
        same = (OpenAIRequest.created_by == caller_id, OpenAIRequest.digest == digest)
        answered_at = OpenAIRequest.answered_at
        may_be_lost = or_(answered_at.is_(None), answered_at > func.now() - _LOST_ANSWER)
        newest = select(OpenAIRequest.idempotency_key).where(*same, may_be_lost)
        if is_retry and (key := await session.scalar(newest)):
            return str(key)
        changed = {"idempotency_key": new_key, "arrived_at": func.now(), "answered_at": None}
        statement = insert(OpenAIRequest).values(row)
        keys = ["created_by", "digest"]
        await session.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))
    return new_key

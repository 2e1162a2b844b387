"""Peer of C5 with the usual design: FastAPI, sse-starlette and one XREAD per subscriber."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header
from redis.asyncio import Redis
from sse_starlette import EventSourceResponse, ServerSentEvent

_BLOCK_MS = 5000
_COUNT = 100


@asynccontextmanager
async def _lifespan(api: FastAPI) -> AsyncIterator[None]:
    # A blocking read occupies its connection, so each subscriber needs one.
    api.state.redis = Redis.from_url(
        os.environ["PEER_REDIS_URL"], decode_responses=True, max_connections=4000, socket_timeout=None
    )
    yield
    await api.state.redis.aclose()


api = FastAPI(lifespan=_lifespan)


@api.get("/healthz")
async def healthz() -> str:
    """Report that the process is up."""
    return "ok"


@api.get("/streams/{name}")
async def follow(name: str, last_event_id: Annotated[str, Header()] = "0") -> EventSourceResponse:
    """Stream events after the cursor, then new ones."""
    return EventSourceResponse(_events(api.state.redis, name, last_event_id))


async def _events(redis: "Redis", name: str, last: str) -> AsyncIterator[ServerSentEvent]:
    while True:
        for _, entries in await redis.xread({name: last}, count=_COUNT, block=_BLOCK_MS) or []:
            for entry_id, fields in entries:
                last = entry_id
                yield ServerSentEvent(data=fields["data"], event=fields["type"], id=entry_id.partition("-")[0])

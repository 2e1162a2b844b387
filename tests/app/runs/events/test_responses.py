"""A stream is cut off when its client takes nothing, and when its key is no longer valid, in every form."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from app.api.errors import ApiError
from app.runs.events import responses, stream
from app.runs.events.responses import OpenStreams, StreamResponse

FORMS = ["text/event-stream", "application/x-ndjson", "text/plain; charset=utf-8"]


class Client:
    """The far end of a stream, which takes nothing of the body, or takes all of it."""

    def __init__(self, reads: bool, allowed: bool) -> None:
        self.body_was_closed = False
        self._reads = reads
        auth = SimpleNamespace(still_valid=self._still_valid)
        app = SimpleNamespace(state=SimpleNamespace(auth=auth, open_streams=OpenStreams(1)))
        caller = SimpleNamespace(key_id="key_1")
        self.scope: Any = {"type": "http", "method": "GET", "headers": [], "app": app, "state": {"caller": caller}}
        self._allowed = allowed

    async def serve(self, media_type: str) -> None:
        response = StreamResponse(Request(self.scope), self._body(), media_type)
        await asyncio.wait_for(response(self.scope, self._receive, self._send), 10)

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"more\n"
                await asyncio.sleep(0.01)
        finally:
            self.body_was_closed = True

    async def _still_valid(self, key_id: str) -> bool:
        assert key_id == "key_1"
        return self._allowed

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and not self._reads:
            await asyncio.Event().wait()


@pytest.mark.parametrize("form", FORMS)
async def test_a_client_that_takes_nothing_is_disconnected(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "SEND_SECONDS", 0.2)
    client = Client(reads=False, allowed=True)
    await client.serve(form)
    assert client.body_was_closed


def test_streams_are_counted_by_key() -> None:
    streams = OpenStreams(2)
    with streams.count_open("key_1"):
        with streams.count_open("key_1"), pytest.raises(ApiError, match="2 open streams") as refused:
            streams.count_open("key_1").__enter__()
        assert (refused.value.status, refused.value.code) == (429, "too_many_streams")
        with streams.count_open("key_1"), streams.count_open("key_2"):
            pass


@pytest.mark.parametrize("reads", [True, False])
async def test_a_key_that_is_no_longer_valid_ends_its_streams_also_those_that_no_one_reads(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(responses, "_CUT_SECONDS", 0.1)
    client = Client(reads, allowed=False)
    await client.serve(FORMS[0])
    assert client.body_was_closed

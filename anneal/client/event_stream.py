"""Typed events, and a reader of a stream that delivers each event once and in order, across reconnects."""

import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import httpx
from httpx_sse import ServerSentEvent

from anneal.client.errors import AnnealError
from anneal.client.transport import Backoff, Session
from anneal.contracts.events import EVENTS, AnyEvent, Event

log = logging.getLogger(__name__)


# The service sends a keep-alive every 15 s; a connection without one for 45 s is dead.
_KEEP_ALIVE_SECONDS = 15.0
_TIMEOUT = httpx.Timeout(10.0, read=3 * _KEEP_ALIVE_SECONDS)


class Follower:
    """Reader of a stream; keeps its position across reconnects."""

    def __init__(
        self,
        session: Session,
        path: str,
        params: dict[str, Any],
        *,
        after: int | None,
        whole: bool = False,
        ends: bool = True,
    ) -> None:
        """Start after event `after`.

        With `whole`, all events are requested, so a gap in the ids is an error. `ends` is False for the stream of all
        runs, which an `end` event does not end.
        """
        self._session = session
        self._path = path
        self._params = params
        self._whole = whole
        self._ends = ends
        self._last = after or 0
        self._cursor: int | None = None
        """Event id sent as `Last-Event-ID` on reconnect; None before the first event."""
        self._progressed = False
        self._opened_at: float | None = None
        """Monotonic time at which the current connection was opened; None if it was refused."""

    async def follow_events(self, patience: float, until: int | None = None) -> AsyncGenerator[AnyEvent]:
        """Yield events until the stream ends; with `until`, yield the stored events, at least up to that id.

        Raises:
            AnnealError: the service refused the request, an event is missing, or nothing arrived for `patience`
                seconds.
        """
        backoff = Backoff()
        heard, warned = time.monotonic(), False
        while until is None or self._last < until:
            self._progressed, self._opened_at = False, None
            asked_for = None
            try:
                async with aclosing(self._read_connection()) as events:
                    async for event in events:
                        if event is None:
                            return
                        yield event
                        if event.type == "end" and self._ends:
                            return
                if until is not None and not self._progressed:
                    return  # the server closed the stream and sent nothing new: end of the stored events
            except AnnealError as error:
                if self._was_alive:
                    heard = time.monotonic()
                if not error.is_transient or time.monotonic() - heard > patience:
                    raise
                if not self._was_alive and not warned:
                    # Once per outage; without a logging configuration, Python prints warnings on standard error.
                    log.warning("%s Retrying for up to %.0f s.", error.detail, patience)
                    warned = True
                asked_for = error.retry_after
            if self._was_alive:
                heard, warned = time.monotonic(), False
                backoff.reset()
            await self._session.transport.pause(backoff.next_delay(asked_for))

    @property
    def _was_alive(self) -> bool:
        """True if the last connection carried an event, or was open for so long that it carried a keep-alive."""
        opened_at = self._opened_at
        return self._progressed or (opened_at is not None and time.monotonic() - opened_at > _KEEP_ALIVE_SECONDS)

    async def _read_connection(self) -> AsyncGenerator[AnyEvent | None]:
        """Yield the events of one connection; yield None if no further event will come (status 204)."""
        transport = self._session.transport
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._cursor is not None:
            headers["Last-Event-ID"] = str(self._cursor)
        request = transport.build_request("GET", self._path, params=self._params, headers=headers, timeout=_TIMEOUT)
        response = await self._session.attempt_once(request)
        try:
            if response.status_code == 204:
                yield None
                return
            check_content_type(response, transport.url)
            self._opened_at = time.monotonic()
            async with aclosing(transport.iterate_sse(response)) as sent:
                async for frame in sent:
                    if frame.event == "cursor" and frame.id.isdigit():  # far after the last event of a requested type
                        self._cursor, self._progressed = int(frame.id), True
                    else:
                        yield self._take_event(frame)
        finally:
            await transport.close_response(response)

    def _take_event(self, sent: ServerSentEvent) -> AnyEvent:
        try:
            event, position = parse_event(sent), int(sent.id)
        except ValueError as error:
            raise AnnealError(
                "stream_broken", f"The stream of {self._path} contains an invalid event: {error}"
            ) from None
        expected = self._last + 1
        # `truncated` may skip ids, and may repeat the last id if the reader has missed nothing.
        is_next = position >= self._last if event.type == "truncated" else position == expected
        if not is_next and (self._whole or position < expected):
            raise AnnealError(
                "stream_broken",
                f"The stream of {self._path} went from event {self._last} to {position}: the service lost or repeated "
                "events. Read the stream again from the beginning, and report this bug.",
            )
        self._last = self._cursor = position
        self._progressed = True
        return event


def check_content_type(response: httpx.Response, url: str) -> None:
    """Raise `AnnealError` if a response is no event stream."""
    if "text/event-stream" not in response.headers.get("content-type", ""):
        raise AnnealError(
            "unexpected_answer",
            f"{url} returned no event stream: check that ANNEAL_URL is the URL of an Anneal service.",
        )


def parse_event(sent: ServerSentEvent) -> AnyEvent:
    """Parse the event in a frame; raises `ValueError` if it is invalid.

    A type that this version does not know is parsed as `Event`. It is no member of the union: type checkers
    could distinguish no other member from one with a `type` of any text.
    """
    data = json.loads(sent.data)
    model = EVENTS.get(sent.event, Event)
    return cast(AnyEvent, model.model_validate({"seq": int(sent.id), **data, "type": sent.event}))

"""uvicorn's HTTP protocol with limits for clients that send slowly or without end."""

import asyncio

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 20.0
"""Seconds from the connection, or the first byte of a further request, to the end of its headers."""
UNREAD_BODY_SECONDS = 30.0
"""Seconds a client may continue to send a body that was already answered, such as a rejected upload."""
UNREAD_RESPONSE_SECONDS = 300.0
"""Seconds a client may take to read enough of a response that more can be sent."""
MAX_HEADER_BYTES = 64 * 1024
"""Bytes without a byte of a body: a request's headers, the extensions of its chunks, its trailers."""
MAX_WAITING_REQUESTS = 16
"""Requests of one connection that may wait for the response to an earlier one; each takes about 10 KiB."""


class Protocol(HttpToolsProtocol):
    """One connection. Bodies are limited in `app.api.middleware.body_limits`, idle connections by uvicorn."""

    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _bytes_without_body = 0
    _answered: RequestResponseCycle | None = None
    """Request that is being answered; `cycle` is the newest one, which may wait for that."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._abort_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_unread_timer()
        self.pipeline.clear()
        if self._answered is not None:
            self._answered.disconnected = True  # uvicorn informs only the newest request
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._bytes_without_body > MAX_HEADER_BYTES:
            self._refuse_endless_headers()
        elif self._timer is None and self.cycle is not None and self.cycle.response_complete:
            # uvicorn has cancelled its timeout of idle connections, even if these bytes begin no request.
            self._abort_after(HEAD_SECONDS)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._bytes_without_body = True, 0
        if self._timer is None:
            self._abort_after(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        # A field after the headers is a trailer: uvicorn would add it to the headers of the request.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timer()
        if len(self.pipeline) < MAX_WAITING_REQUESTS:
            super().on_headers_complete()
        else:
            self.transport.close()  # the rest of the received bytes is parsed, and ignored

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # uvicorn would read more, and queue it, after each response
        if self._timer is not None:
            return
        if self.cycle is not None and self.cycle.more_body:
            self._abort_after(UNREAD_BODY_SECONDS)
        elif self.transport.is_closing():
            self._abort_after(UNREAD_RESPONSE_SECONDS)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._timer is None:
            self._abort_after(UNREAD_RESPONSE_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_RESPONSE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_unread_timer()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse_endless_headers(self) -> None:
        is_waiting = self._answered is not None and self.cycle is not self._answered
        if is_waiting or (not self._in_head and self.cycle.response_started):
            self.transport.close()  # a second response would be read as a part of the first
            return
        limit = f"{MAX_HEADER_BYTES:,} bytes"
        self.send_400_response(f"The headers and the trailers of a request may have at most {limit} each; send fewer.")

    def _abort_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

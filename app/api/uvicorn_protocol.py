"""uvicorn's HTTP protocol with limits for clients that send slowly or without end."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0
"""Seconds from the connection, or the first byte of a further request, to the end of its headers."""
UNREAD_BODY_SECONDS = 30.0
"""Seconds a client may continue to send a body that was already answered, such as a rejected upload."""
MAX_HEADER_BYTES = 64 * 1024


class Protocol(HttpToolsProtocol):
    """One connection. Bodies are limited in `app.api.middleware.body_limits`, idle connections by uvicorn."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._abort_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers of a request may have at most {MAX_HEADER_BYTES:,} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._abort_after(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and self.cycle.more_body and self._timer is None:
            self._abort_after(UNREAD_BODY_SECONDS)

    def _abort_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

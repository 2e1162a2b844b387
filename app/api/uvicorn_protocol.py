"""uvicorn's HTTP protocol with limits for clients that send slowly or without end."""

import asyncio
import sys
from collections import Counter
from http import HTTPStatus
from weakref import WeakKeyDictionary

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.api.errors import ApiError, ResponseCut, problem_response

HEAD_SECONDS = 20.0
"""Seconds from the connection, or the first byte of a further request, to the end of its headers."""
UNREAD_BODY_SECONDS = 30.0
"""Seconds a client may continue to send a body that was already answered, such as a rejected upload."""
UNREAD_RESPONSE_SECONDS = 300.0
"""Seconds a client may take to read enough of a response that more can be sent."""
MAX_HEADER_BYTES = 64 * 1024
"""Bytes without a byte of a body: a request's headers, the extensions of its chunks, its trailers."""
_PIECE_BYTES = 32 * 1024
MAX_HEADER_FIELDS = 100
"""Fields of a request's headers, and of its trailers: one of four bytes takes 150 bytes of memory. Requests of one
connection that wait for the response to an earlier one may have as many together."""
MAX_WAITING_REQUESTS = 16
"""Requests of one connection that may wait for the response to an earlier one; each takes about 10 KiB."""
MAX_UNREAD_BYTES = 256 * 2**20
"""Bytes of responses that clients have not read, in this process; then the oldest of the key with most are dropped."""


class UnreadResponses:
    """Connections whose clients read more slowly than is sent, with the bytes that wait in this process."""

    def __init__(self) -> None:
        self._waiting: dict[Protocol, tuple[str, int]] = {}
        """Key and bytes of each, oldest first."""
        self._bytes_by_key: Counter[str] = Counter()

    def add(self, connection: "Protocol", key_id: str, size: int) -> None:
        """Add a connection; drop the oldest ones of the key that holds most, but not this one, while it is too much."""
        self.remove(connection)
        self._waiting[connection] = key_id, size
        self._bytes_by_key[key_id] += size
        while self._bytes_by_key.total() > MAX_UNREAD_BYTES:
            largest = max(self._bytes_by_key, key=self._bytes_by_key.__getitem__)
            oldest = next(waiting for waiting, (owner, _) in self._waiting.items() if owner == largest)
            if oldest is connection:
                return
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: "Protocol") -> None:
        """Remove a connection that has been read or closed."""
        if connection in self._waiting:
            key_id, size = self._waiting.pop(connection)
            self._bytes_by_key[key_id] -= size
            if not self._bytes_by_key[key_id]:
                del self._bytes_by_key[key_id]


_unread_of: WeakKeyDictionary[ServerState, UnreadResponses] = WeakKeyDictionary()


class Protocol(HttpToolsProtocol):
    """One connection. Bodies are limited in `app.api.middleware.body_limits`, idle connections by uvicorn."""

    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _bytes_without_body = 0
    _fields = 0
    _has_too_many_fields = False
    url = b""
    """Target of the newest request, as far as it was received."""
    _answered: RequestResponseCycle | None = None
    """Request that is being answered; `cycle` is the newest one, which may wait for that."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = _unread_of.setdefault(self.server_state, UnreadResponses())
        self._abort_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_unread_timer()
        self._unread.remove(self)
        self.pipeline.clear()
        if self._answered is not None:
            self._answered.disconnected = True  # uvicorn informs only the newest request
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In pieces: the count starts again in the piece in which a request begins, and `data` may have 256 KiB.
        for start in range(0, len(data), _PIECE_BYTES):
            if not self.transport.is_closing():
                self._receive_piece(data[start : start + _PIECE_BYTES])

    def _receive_piece(self, data: bytes) -> None:
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
        self._in_head, self._bytes_without_body, self._fields = True, 0, 0
        if self._timer is None:
            self._abort_after(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_HEADER_FIELDS:
            self._has_too_many_fields = True
            raise ValueError("too many fields")  # ends the parser, which then parses no further field
        # A field after the headers is a trailer: uvicorn would add it to the headers of the request.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._fields = False, 0
        self._cancel_timer()
        waiting = [self.scope, *(cycle.scope for cycle, _ in self.pipeline)]
        fields = sum(len(list(scope["headers"])) for scope in waiting)
        if len(self.pipeline) < MAX_WAITING_REQUESTS and fields <= MAX_HEADER_FIELDS:
            super().on_headers_complete()
        else:
            self.transport.close()  # the rest of the received bytes is parsed, and ignored

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
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
        state = {} if self._answered is None else self._answered.scope.get("state", {})
        key_id = state["caller"].key_id if "caller" in state else ""
        self._unread.add(self, key_id, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._cancel_unread_timer()
        self._unread.remove(self)
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            _send_without_chunks(cycle)
        super()._start_asgi_task(cycle, _closing_cut_responses(cycle, app))

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read; `msg` is uvicorn's, which does not say what to do."""
        if self._has_too_many_fields:
            detail = f"A request may have at most {MAX_HEADER_FIELDS} headers and as many trailers; send fewer."
            self._send_error(ApiError(431, "too_many_headers", detail))
        else:
            self._send_error(
                ApiError(400, "invalid_http", "This is not HTTP/1.1; send the request with an HTTP client.")
            )

    def _refuse_endless_headers(self) -> None:
        limit = f"{MAX_HEADER_BYTES:,} bytes"
        detail = f"The headers and the trailers of a request may have at most {limit} each; send fewer."
        self._send_error(ApiError(431, "headers_too_large", detail))

    def _send_error(self, error: ApiError) -> None:
        """Send an error and close the connection; only close it where this would be read as a part of a response."""
        cycle, is_open = self.cycle, not self.transport.is_closing()
        if cycle is not None:
            has_begun = not cycle.response_complete if self._in_head else cycle.response_started
            is_open = is_open and cycle is self._answered and not has_begun
        if is_open:
            path = self.url.partition(b"?")[0].decode("latin-1")
            response = problem_response({"path": path}, error)
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()

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


def _closing_cut_responses(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Let the connection be closed for a `ResponseCut`, which is logged already: uvicorn would log a traceback."""

    async def run_app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        try:
            await app(scope, receive, send)
        except ResponseCut:
            cycle.disconnected = True
            cycle.transport.close()

    return run_app


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end a body of unknown length: HTTP/1.0 has no chunks, and uvicorn sends them."""
    send = cycle.send
    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]

"""Checks of every request before an endpoint sees it: parameters, body size, valid text, well-formed JSON."""

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anneal.contracts.errors import FieldError
from app.api.authorization import is_public
from app.api.errors import ApiError, invalid, problem_response, to_printable, too_large
from app.config import Settings
from app.infra import strict_json

STREAMED = {("POST", "/v1/datasets"), ("POST", "/openai/v1/files")}
"""Endpoints that stream their body, up to `max_upload_bytes`; all others take JSON up to `max_json_bytes`."""
_MOST_PUBLIC_BYTES = {("POST", "/v1/session"): 4096}
"""Most bytes of a body that is read without a key, where there is one."""
MOST_PARAMETERS = 100
"""Query parameters: a URL of 64 KiB could have 30,000, each of which may be an error in the response."""
_MULTIPART_OVERHEAD = 64 * 1024
_PARSE_IN_THREAD = 64 * 1024
_MOST_VALUES = 10_000
"""Values of a body, each of which may be an error in the response."""
_MOST_VALUES_OF = {("POST", "/openai/v1/completions"): 200_000}
"""Of a call whose values may be the tokens of a prompt, of which only the first wrong one is an error."""
_IDLE_SECONDS = 60.0


class BodyLimitMiddleware:
    """Middleware after authentication: limits bodies with and without a length, and rejects invalid text."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            checked = await self._check_request(scope, receive)
        except ApiError as error:
            await problem_response(scope, error)(scope, receive, send)
            return
        if checked is not None:
            await self.app(scope, checked, send)

    async def _check_request(self, scope: Scope, receive: Receive) -> Receive | None:
        """Return the `receive` for the endpoint, or None if the client has disconnected."""
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise _invalid_text("nul_in_text", "the URL has a NUL character (%00); remove it")
        if scope["query_string"].count(b"&") >= MOST_PARAMETERS:
            raise _invalid_text(
                "too_many_parameters", f"the URL has more than {MOST_PARAMETERS} parameters; send fewer"
            )
        headers = Headers(scope=scope)
        length = _content_length(headers)
        if (scope["method"], scope["path"]) in STREAMED:
            limit = self.settings.max_upload_bytes
            if length > limit + _MULTIPART_OVERHEAD:
                raise too_large("An upload", limit)
            return _limit_body(receive, limit)
        if length == 0 and "transfer-encoding" not in headers:
            return receive
        limit = (
            _MOST_PUBLIC_BYTES.get((scope["method"], scope["path"]), 0)
            if is_public(scope)
            else self.settings.max_json_bytes
        )
        if length > limit:
            raise too_large("The body of this request", limit)
        body = await _read_body(receive, limit)
        if body is None:
            return None
        if body and scope["method"] in ("POST", "PUT", "PATCH"):
            _check_media_type(headers.get("content-type", ""))
            await _check_json(body, _MOST_VALUES_OF.get((scope["method"], scope["path"]), _MOST_VALUES))
        return _replay_body(body, receive)


def _content_length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ApiError(400, "bad_request", "Content-Length is not a number; leave it to your HTTP client.")
    return int(text)


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await _receive_next(receive)
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large("The body of this request", limit)
        if not message.get("more_body", False):
            return bytes(body)


async def _receive_next(receive: Receive) -> Message:
    """Return the next piece of a body; raises a 408 error if the client sends nothing for `_IDLE_SECONDS`."""
    try:
        async with asyncio.timeout(_IDLE_SECONDS):
            return await receive()
    except TimeoutError:
        detail = f"No data of the body was received for {_IDLE_SECONDS:.0f} seconds; send the request again."
        raise ApiError(408, "body_timeout", detail) from None


def _check_media_type(content_type: str) -> None:
    if not re.fullmatch(r"application/([\w.-]+\+)?json", content_type.partition(";")[0].strip().lower()):
        actual = f"not {to_printable(content_type, 60)}" if content_type else "which is missing"
        detail = f"Send JSON with the header `Content-Type: application/json`, {actual}: curl --json '…' sets it."
        raise ApiError(415, "unsupported_media_type", detail)


async def _check_json(body: bytes, most_values: int) -> None:
    try:
        if len(body) > _PARSE_IN_THREAD:
            await asyncio.to_thread(strict_json.parse_json, body, most_values)
        else:
            strict_json.parse_json(body, most_values)
    except strict_json.BadJson as error:
        raise _invalid_text(error.code, error.message) from None


def _invalid_text(code: str, message: str) -> ApiError:
    return invalid([FieldError(field="", code=code, message=message)])


def _replay_body(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_replayed() -> Message:
        return pending.pop() if pending else await receive()

    return receive_replayed


def _limit_body(receive: Receive, limit: int) -> Receive:
    total = 0

    async def receive_limited() -> Message:
        nonlocal total
        message = await _receive_next(receive)
        total += len(message.get("body", b""))
        if total > limit + _MULTIPART_OVERHEAD:
            raise too_large("An upload", limit)
        return message

    return receive_limited

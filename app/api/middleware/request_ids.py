"""Middleware that gives each request an id and answers unexpected errors."""

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import (
    ApiError,
    ResponseCut,
    _status_error,
    as_api_error,
    log,
    problem_response,
    request_id,
    to_printable,
)


def _is_plain(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return True if a response of the framework is plain text or empty."""
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    return not kinds or kinds[0].startswith(b"text/plain")


def _plain_problem(scope: Scope, status: int, headers: list[tuple[bytes, bytes]]) -> Response:
    """Create the problem+json response that replaces such a response, with its other headers."""
    decoded = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    other_headers = {name: value for name, value in decoded.items() if not name.lower().startswith("content-l")}
    other_headers.pop("content-type", None)
    return problem_response(scope, _status_error(status, "The request cannot be processed; see /docs.", other_headers))


def _log_failed_task(id: str, scope: Scope, error: Exception) -> None:
    """Log the error of a task that ran after the response; whatever it has left is done by the next periodic pass."""
    # Starlette raises a RuntimeError of its own where a handler exists for the error.
    cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
    request = (id, scope["method"], to_printable(scope["path"], 200))
    if (known := as_api_error(cause)) is not None:
        log.warning("%s %s %s was answered, but its task afterwards failed: %s", *request, known.detail)
    else:
        log.error("%s %s %s was answered, but its task afterwards failed", *request, exc_info=error)


class RequestIdMiddleware:
    """Outermost middleware: sets a request id on every response; answers and logs unhandled exceptions."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id = request_id(scope)
        started = replaced = is_complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, replaced, is_complete
            if message["type"] == "http.response.start":
                started = True
                headers = [item for item in message["headers"] if item[0].lower() != b"x-request-id"]
                if message["status"] >= 400 and _is_plain(headers):
                    replaced = True
                    await _plain_problem(scope, message["status"], headers)(scope, receive, send)
                message = {**message, "headers": [*headers, (b"x-request-id", id.encode())]}
            if not replaced:
                await send(message)
            if message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)

        try:
            await self.app(scope, receive, send_with_id)
        except ResponseCut as cut:
            log.error("%s was cut off before its end: %s", id, cut)
            raise
        except Exception as error:
            if is_complete:
                _log_failed_task(id, scope, error)
                return  # raised, it would close the connection, on which the client's next request may be
            answer = as_api_error(error)
            if answer is None:
                log.exception("%s %s %s failed", id, scope["method"], to_printable(scope["path"], 200))
                answer = ApiError(
                    500,
                    "internal",
                    f"Internal server error; the server's log has the details under {id}. Trying again may help.",
                )
            if started:
                raise  # the headers are already sent: aborting the connection is the only way to signal the error
            await problem_response(scope, answer)(scope, receive, send_with_id)

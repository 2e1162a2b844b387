"""The client's only exception: an error response, or no response."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from app.contracts.errors import FieldError

_PASSING = {429, 502, 503, 504}


class AnnealError(Exception):
    """Failed call; `str()` of it is a sentence that says what to do next.

    `status` and `request_id` are None if there was no response or no request. `code` is stable for each cause;
    `errors` lists every invalid field.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        status: int | None = None,
        errors: Sequence[FieldError] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status
        self.errors = list(errors)
        self.request_id = request_id
        self.retry_after = retry_after

    @property
    def is_transient(self) -> bool:
        """True if the error is transient and a retry may succeed."""
        return self.status in _PASSING or self.code in ("unreachable", "connection_lost")


def from_response(response: httpx.Response) -> AnnealError:
    """Build the error from an error response that has been read: problem+json, or any body from a proxy."""
    body = _json_object(response)
    items = body.get("errors")
    errors = [FieldError(**item) for item in items if _is_field_error(item)] if isinstance(items, list) else []
    path = f"{response.request.method} {response.request.url.path}"
    detail = body.get("detail") or f"{path} returned {response.status_code} {response.reason_phrase}."
    return AnnealError(
        str(body.get("code") or f"http_{response.status_code}"),
        str(detail),
        status=response.status_code,
        errors=errors,
        request_id=response.headers.get("x-request-id"),
        retry_after=_seconds(response.headers.get("retry-after")),
    )


@contextmanager
def describe(url: str) -> Iterator[None]:
    """Convert connection errors to `AnnealError`: `unreachable` if no request was sent, else `connection_lost`."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError) as error:
        raise AnnealError(
            "unreachable",
            f"The service at {url} is unreachable ({str(error) or type(error).__name__}): start it with `anneal up`, "
            "or set ANNEAL_URL and ANNEAL_API_KEY to another service.",
        ) from error
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise AnnealError(
            "connection_lost",
            f"The connection to {url} was lost ({reason}). The call may or may not have been executed.",
        ) from error


def _json_object(response: httpx.Response) -> dict[str, object]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _is_field_error(item: object) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("field", "code", "message"))


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None

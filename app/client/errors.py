"""The one exception of the client: what the service answered, or that it did not answer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from app.wire import FieldError

_PASSING = {429, 502, 503, 504}


class AnnealError(Exception):
    """A call that did not succeed; `str()` of it is a sentence that tells what to do next.

    `status` and `request_id` are None where no answer came, or where none was asked for. `code` never changes for one
    cause; `errors` has every field that is wrong.
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
    def is_passing(self) -> bool:
        """Whether the same call may succeed in a moment."""
        return self.status in _PASSING or self.code in ("unreachable", "connection_lost")


def of_answer(response: httpx.Response) -> AnnealError:
    """From an answer that is not a success and has been read; problem+json, or whatever a proxy says."""
    told = _json_object(response)
    items = told.get("errors")
    errors = [FieldError(**item) for item in items if _is_field_error(item)] if isinstance(items, list) else []
    path = f"{response.request.method} {response.request.url.path}"
    detail = told.get("detail") or f"{path} was answered with {response.status_code} {response.reason_phrase}."
    return AnnealError(
        str(told.get("code") or f"http_{response.status_code}"),
        str(detail),
        status=response.status_code,
        errors=errors,
        request_id=response.headers.get("x-request-id"),
        retry_after=_seconds(response.headers.get("retry-after")),
    )


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """What goes wrong with a connection to `url`, as an `AnnealError`: `unreachable` where nothing was sent yet."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError) as error:
        raise AnnealError(
            "unreachable",
            f"The service at {url} does not answer ({str(error) or type(error).__name__}): start it with `anneal up`, "
            "or set ANNEAL_URL and ANNEAL_API_KEY to the service that you mean.",
        ) from error
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise AnnealError(
            "connection_lost", f"The connection to {url} broke ({reason}); whether the call was carried out is unknown."
        ) from error


def _json_object(response: httpx.Response) -> dict[str, object]:
    try:
        told = response.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _is_field_error(item: object) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("field", "code", "message"))


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None

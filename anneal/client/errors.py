"""The client's only exception: an error response, or no response."""

import json
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from anneal.contracts.errors import FieldError

_CALLS = (
    (r"GET /v1/runs\?status=(\w+)", r'`client.runs.list(status=["\1"])`'),
    (r"GET (?:/v1/runs/[^/\s]+|…)/(checkpoints|artifacts)", r"`client.runs.\1(run_id)`"),
    (r"GET /v1/runs/[^/\s]+/actions", "`client.actions.list(run_id)`"),
    (r"GET /v1/webhooks/\{id\}/deliveries", "`client.webhooks.deliveries(webhook_id)`"),
    (r"`?GET /openai/v1/models`? lists .*?(?=\.$)", "`client.models.list()` and `client.runs.list()` list them"),
    (r'PATCH it with \{"enabled": true\} first', "update it with `enabled=True` first"),
    (r"GET /v1/(datasets|experiments|keys|models|runs|webhooks|workers)\b", r"`client.\1.list()`"),
    (r"POST /v1/datasets\b", "`client.datasets.upload()`"),
    (r"POST /v1/experiments\b", "`client.experiments.create()`"),
    (r"`POST /v1/runs/estimate`", "`client.runs.estimate()`"),
    (r'PATCH it with \{"pinned": false\} first', "unpin it first with `pinned=False`"),
    (r"send `file_format`", "set `file_format`"),
    (r"set the field `format` before the file", "set `format`"),
    (r"[Cc]orrect it and send the request again", "Correct it and try again"),
    (r"send the request again", "try again"),
)
"""Patterns of what the service's sentences say to callers of its HTTP API, and what a user of this client does."""

_PASSING = {429, 502, 503, 504}


def in_calls(text: str) -> str:
    """Return a sentence of the service with the matching calls of this client in place of HTTP calls."""
    for pattern, call in _CALLS:
        text = re.sub(pattern, call, text)
    return text


class AnnealError(Exception):
    """Failed call; `str()` of it is a sentence that says what to do next.

    `detail` is the sentence of the service, which may name its HTTP calls; `str()` names those of this client.
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
        is_permanent: bool = False,
    ) -> None:
        super().__init__(in_calls(detail))
        self.code = code
        self.detail = detail
        self.status = status
        self.errors = list(errors)
        self.request_id = request_id
        self.retry_after = retry_after
        self._is_permanent = is_permanent

    @property
    def is_transient(self) -> bool:
        """True if the error is transient and a retry may succeed."""
        is_passing = self.status in _PASSING or self.code in ("unreachable", "connection_lost")
        return is_passing and not self._is_permanent


def from_response(response: httpx.Response) -> AnnealError:
    """Build the error from an error response that has been read.

    Its body is problem+json, that of OpenAI's form below `/openai`, or anything from a proxy.
    """
    body = _json_object(response.content)
    if isinstance(problem := body.get("error"), dict):
        body = {**problem, "detail": problem.get("message")}
    items = body.get("errors")
    errors = [FieldError(**item) for item in items if _is_field_error(item)] if isinstance(items, list) else []
    detail = body.get("detail") or _without_problem(response)
    return AnnealError(
        str(body.get("code") or f"http_{response.status_code}"),
        str(detail),
        status=response.status_code,
        errors=errors,
        request_id=response.headers.get("x-request-id"),
        retry_after=_parse_seconds(response.headers.get("retry-after")),
        is_permanent=response.headers.get("x-should-retry") == "false",
    )


def error_of_event(data: str) -> AnnealError | None:
    """Build the error that the data of an event of an answer has, in OpenAI's form; None if it has none."""
    problem = _json_object(data).get("error")
    if not isinstance(problem, dict):
        return None
    return AnnealError(str(problem.get("code")), str(problem.get("message")))


def _without_problem(response: httpx.Response) -> str:
    """Return the sentence for an error response that is not Anneal's, as of a proxy."""
    status = f"{response.status_code} {response.reason_phrase}".strip()
    host = response.request.url.netloc.decode("ascii", "replace")
    if response.status_code >= 500:
        return f"The service at {host}, or a proxy before it, has failed ({status}): try again, and ask the operator."
    return (
        f"The server at {host} refused the request ({status}) and does not answer as Anneal does: check ANNEAL_URL, "
        "and whether a proxy before the service asks for something else."
    )


@contextmanager
def convert_errors(url: str) -> Iterator[None]:
    """Convert connection errors to `AnnealError`: `unreachable` if no request was sent, else `connection_lost`."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError) as error:
        if certificate := _certificate_error(error):
            raise AnnealError(
                "certificate_error",
                f"The certificate of {url} cannot be verified ({certificate}): if a private authority signed it, name "
                "the file of its certificate (ANNEAL_CA_FILE, or `anneal --ca-file FILE …`); else correct the host in "
                "ANNEAL_URL, or let the operator renew the certificate.",
            ) from error
        if _is_not_tls(error):
            raise AnnealError(
                "no_tls",
                f"{url} does not speak TLS: set ANNEAL_URL to http://…, or to the address of its proxy with TLS.",
            ) from error
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


def _certificate_error(error: BaseException | None) -> str | None:
    """Return why a certificate was not accepted; None for other errors."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def _is_not_tls(error: BaseException | None) -> bool:
    """Return True if the server answered a TLS handshake with something else."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _json_object(text: str | bytes) -> dict[str, object]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _is_field_error(item: object) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("field", "code", "message"))


def _parse_seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None

"""API errors: a stable code, a message that says what to do next, and one wire format."""

import asyncio
import difflib
import errno
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast, get_args

import psycopg
import sqlalchemy.exc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.peer_names import RESOURCES
from anneal.contracts.training_config.validation import config_errors
from app.infra.db import is_away, is_conflict, is_timeout
from app.infra.files.disk_space import FULL, DiskReserveReached
from app.infra.files.object_store import StoreBusy, StoreUnavailable
from app.infra.ids import new_id

log = logging.getLogger(__name__)


MEDIA_TYPE = "application/problem+json"

_OPENAI_CODES = {"invalid_key": "invalid_api_key"}
"""Codes that clients of OpenAI's API compare, by ours."""

RETRY_SECONDS = 5

_MAX_ERRORS = 100
_SHOWN_ERRORS = 20
"""Errors of fields in the message of an error of OpenAI's form."""

_BROKEN_DISK = {errno.EROFS, errno.EIO, errno.ESTALE}
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
"""Errors of opening files, and of starting processes and threads."""

_REQUIRED = ("missing", "union_tag_not_found")
_NOT_AN_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Types of pydantic's errors."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class ApiError(Exception):
    """Error that the caller can act on. `detail` says what to do next; `code` never changes."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})


class ResponseCut(Exception):
    """End of a response before its last byte; the text is a sentence for the log.

    Its status is already sent, so that the connection is closed instead of an error.
    """


def not_found(kind: str, id: str) -> ApiError:
    """Create a 404 error for a resource, such as `not_found("run", run_id)`."""
    listing = f"list the existing ones with GET /v1/{kind}s"
    return ApiError(404, f"{kind}_not_found", f"There is no {kind} {_short_id(id)}; {listing}.")


def conflict(code: str, detail: str) -> ApiError:
    """Create a 409 error; `detail` names the current state."""
    return ApiError(409, code, detail)


def invalid(errors: Sequence[FieldError], detail: str | None = None, code: str = "invalid_request") -> ApiError:
    """Create a 422 error that lists every problem at once."""
    return ApiError(422, code, detail or _error_summary(errors), errors)


def dataset_not_found(field: str, dataset_id: str) -> FieldError:
    """Create the error of a field that names a dataset which does not exist."""
    message = f"there is no dataset with the id {dataset_id[:60]!r}; upload one with POST /v1/datasets"
    return FieldError(field=field, code="dataset_not_found", message=message)


def too_large(what: str, limit: int) -> ApiError:
    """Create a 413 error that names the limit."""
    return ApiError(413, "body_too_large", f"{what} may have at most {limit:,} bytes; send less, or in parts.")


def disk_full(
    detail: str = "The disk of the server is full and nothing was stored; free some space and try again.",
) -> ApiError:
    """Create a 507 error: nothing of the request was stored."""
    return ApiError(507, "disk_full", detail)


def database_unavailable() -> ApiError:
    """Create a 503 error with `Retry-After`."""
    return ApiError(
        503,
        "database_unavailable",
        f"The database does not answer; try again in {RETRY_SECONDS} seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def statement_timeout() -> ApiError:
    """Create a 503 error for a statement that PostgreSQL cancelled at its timeout: the database is up, but too slow."""
    return ApiError(
        503,
        "statement_timeout",
        "The database query exceeded its time limit and was cancelled; request less data at once, or try again "
        f"in {RETRY_SECONDS} seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def transaction_conflict() -> ApiError:
    """Create a 503 error for a transaction that PostgreSQL ended because it and another one waited for each other."""
    return ApiError(
        503,
        "transaction_conflict",
        f"Another request changed the same rows at that moment and nothing was stored; try again in {RETRY_SECONDS} "
        "seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def storage_unavailable(clause: str) -> ApiError:
    """Create a 503 error for an object store that cannot be used now."""
    return ApiError(
        503,
        "storage_unavailable",
        f"The storage cannot be used now ({clause}); try again in {RETRY_SECONDS} seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def storage_busy(clause: str) -> ApiError:
    """Create a 503 error for an object store for which too many calls wait already."""
    return ApiError(
        503,
        "storage_busy",
        f"The storage cannot be used now ({clause}); try again in {RETRY_SECONDS} seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def server_exhausted(clause: str) -> ApiError:
    """Create a 503 error for a limit of the machine, such as that of open files or processes."""
    return ApiError(
        503,
        "server_exhausted",
        f"The server has reached a limit of its machine ({clause}); try again in {RETRY_SECONDS} seconds.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def as_api_error(error: BaseException) -> ApiError | None:
    """Return the API error for a failure of the database, the disk or the storage; None for any other exception."""
    if isinstance(error, StoreBusy):
        return storage_busy(str(error))
    if isinstance(error, StoreUnavailable):
        return storage_unavailable(str(error))
    if isinstance(error, DiskReserveReached):
        return disk_full(str(error))
    original = getattr(error, "orig", None) or error
    if isinstance(original, psycopg.errors.DiskFull):
        return disk_full()
    if is_timeout(error):
        return statement_timeout()
    if is_conflict(error):
        return transaction_conflict()
    if is_away(error):
        return database_unavailable()
    if isinstance(error, OSError) and error.errno in FULL:
        return disk_full()
    if isinstance(error, OSError) and error.errno in _BROKEN_DISK:
        return storage_unavailable(f"{error.strerror}; an operator checks its disk")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return server_exhausted(str(error.strerror))
    return None


def request_id(scope: Scope) -> str:
    """Return the id of this request, as in its `x-request-id` header and in the log."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = new_id("req")
    return str(state["request_id"])


def is_below_openai(path: str) -> bool:
    """Return True if the path belongs to the OpenAI-compatible API, whose errors have OpenAI's form."""
    return path == "/openai" or path.startswith("/openai/")


def problem_response(scope: Scope, error: ApiError) -> Response:
    """Create the response for `error`: problem+json, or OpenAI's form below `/openai`."""
    id = request_id(scope)
    if is_below_openai(scope.get("path", "")):
        return _openai_response(id, error)
    body: dict[str, Any] = {
        "type": f"urn:anneal:problem:{error.code}",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": to_printable(error.detail, 2000),
        "code": error.code,
        "request_id": id,
    }
    if error.errors:
        body["errors"] = _printable_errors(error)
    headers = {**error.headers, "x-request-id": id}
    return JSONResponse(body, error.status, headers, MEDIA_TYPE)


def _openai_response(id: str, error: ApiError) -> Response:
    """Create the response for `error` in OpenAI's form, with its 400 for an invalid request.

    Several errors of fields are in `errors`, which OpenAI's form does not have and its clients ignore.
    """
    status, headers = 400 if error.status == 422 else error.status, {**error.headers, "x-request-id": id}
    if status == 409:
        headers.setdefault("x-should-retry", "false")  # the clients repeat a 409, which changes nothing here
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    errors, message = _printable_errors(error), to_printable(error.detail, 2000)
    # Of one error, the code of its field says more than that of the request.
    code = errors[0]["code"] if len(errors) == 1 and error.code == "invalid_request" else error.code
    if len(errors) > 1:  # the clients show the message alone
        message += "".join(f"\n- `{item['field']}`: {item['message']}" for item in errors[:_SHOWN_ERRORS])
    body: dict[str, Any] = {
        "message": message,
        "type": kind,
        "param": (errors[0]["field"] or None) if errors else None,
        "code": _OPENAI_CODES.get(code, code),
    }
    if len(errors) > 1:
        body["errors"] = errors
    return JSONResponse({"error": body}, status, headers)


def _printable_errors(error: ApiError) -> list[dict[str, str]]:
    return [
        {
            "field": to_printable(item.field, 200),
            "code": to_printable(item.code, 100),
            "message": to_printable(item.message, 500),
        }
        for item in error.errors[:_MAX_ERRORS]
    ]


def to_printable(text: str, most: int) -> str:
    """Return `text` without control characters and lone surrogates, cut to `most` characters, for use in responses."""
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def _short_id(id: str) -> str:
    return to_printable(id, 60)


def _error_summary(errors: Sequence[FieldError]) -> str:
    if not errors:
        return "The request is invalid; correct it and send it again."
    first = f"`{errors[0].field}`: {errors[0].message}" if errors[0].field else errors[0].message
    more = f" `errors` has {len(errors) - 1} more." if len(errors) > 1 else ""
    return f"{to_printable(first, 500).rstrip('.')}.{more} Correct it and send the request again."


def from_validation(problems: Sequence[Any], known: Collection[str] = ()) -> list[FieldError]:
    """Convert pydantic's errors to field errors, without the input values; `known` are the fields of the body."""
    errors = []
    for item in problems[:_MAX_ERRORS]:
        location = [str(part) for part in item["loc"]]
        if location and location[0] in ("body", "query", "path", "header", "cookie"):
            location = location[1:]
        message = _error_sentence(item, known)
        if named := item.get("ctx", {}).get("field"):
            location.append(str(named))  # the discriminator field
        if location[-1:] == ["[key]"]:  # a name that the sender has chosen
            location, message = location[:-1], f"the name {message}"
        if item["type"] == "json_invalid":
            location, message = [], f"the body is not JSON: {item.get('ctx', {}).get('error', message)}"
        elif not location and item["type"] in (*_REQUIRED, *_NOT_AN_OBJECT):
            message = f"the body {message}"
        errors.append(
            FieldError(
                field=to_printable(".".join(location), 200),
                code=to_printable(str(item["type"]), 100),
                message=to_printable(message, 500),
            )
        )
    return errors


def _error_sentence(item: Any, known: Collection[str]) -> str:
    """Return what is wrong with a value, in the words of the other messages."""
    kind, message = str(item["type"]), str(item["msg"]).removeprefix("Value error, ")
    if kind in _REQUIRED:
        return "is required"
    if kind in _NOT_AN_OBJECT:
        return "must be a JSON object with fields and values"
    if kind == "list_type":
        return 'must be a list, such as `["a", "b"]`'
    if kind == "extra_forbidden":
        name = str(item["loc"][-1])
        if item["loc"][-2:-1] == ("resources",):
            near = [RESOURCES[name]] if name in RESOURCES else difflib.get_close_matches(name, RESOURCES.values(), n=1)
            return f"is not a resource; perhaps `resources.{near[0]}`" if near else "is not a resource; leave it out"
        near = difflib.get_close_matches(name, known, n=1) if len(item["loc"]) == 2 else []
        if "config" in known and name in TrainingConfig.model_fields:
            near = [f"config.{name}"]
        elif "resources" in known and name in RESOURCES:
            near = [f"resources.{RESOURCES[name]}"]
        return "is not a field of this request" + (f"; perhaps `{near[0]}`" if near else "; leave it out")
    return re.sub(r"^[A-Z]\w+ should ", "must ", message)


def _body_models(request: Request) -> list[Any]:
    """Return the models that the body of this request may have."""
    body = getattr(request.scope.get("route"), "body_field", None)
    annotation = body.field_info.annotation if body is not None else None
    return [annotation, *get_args(annotation)]


def _errors_in_config(body: Mapping[str, Any]) -> list[FieldError]:
    """Return the errors in the configuration of a run, whose request is invalid elsewhere: all are reported at once."""
    config, rules = body["config"], BACKEND_RULES.get(str(body.get("backend", "celery")))
    if rules is not None and rules.options is not None:
        config = {name: value for name, value in config.items() if name != "extra"}
    errors = config_errors(config, has_eval_dataset=body.get("eval_dataset_id") is not None)
    return [one.model_copy(update={"field": f"config.{one.field}"}) for one in errors]


_HTTP_DETAILS = {
    400: "The request could not be read; see /docs for the parameters of this endpoint.",
    404: "Nothing exists at this path; /docs lists all endpoints.",
    405: "This path does not support the method; `Allow` lists the supported ones, and /docs lists all endpoints.",
    416: "The range starts after the end of the file; `Content-Range` has its length.",
}


async def _api_error(request: Request, error: Exception) -> Response:
    return problem_response(request.scope, cast(ApiError, error))


async def _validation_error(request: Request, error: Exception) -> Response:
    invalid_request, models = cast(RequestValidationError, error), _body_models(request)
    known = {name for model in models for name in getattr(model, "model_fields", ())}
    errors, body = from_validation(invalid_request.errors(), known), invalid_request.body
    is_run = any(isinstance(model, type) and issubclass(model, RunCreate) for model in models)
    # A configuration that is too large is an error of its own.
    is_config_wrong = any(one.field.partition(".")[0] == "config" for one in errors)
    if is_run and not is_config_wrong and isinstance(body, dict) and isinstance(body.get("config"), dict):
        errors += await asyncio.to_thread(_errors_in_config, body)
    return problem_response(request.scope, invalid(errors))


async def _http_error(request: Request, raised: Exception) -> Response:
    error = cast(HTTPException, raised)
    if error.status_code < 400:
        return Response(status_code=error.status_code, headers=error.headers)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_supported_methods(request))
    return problem_response(request.scope, _status_error(error.status_code, str(error.detail), headers))


def _supported_methods(request: Request) -> list[str]:
    """Return the methods of this path; the framework names only those of the first route that has it."""
    scope = {name: request.scope.get(name, "") for name in ("type", "path", "root_path")} | {"headers": []}
    return [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


def _status_error(status: int, detail: str, headers: Mapping[str, str] | None) -> ApiError:
    """Create the error for a status code that the framework set."""
    detail = _HTTP_DETAILS.get(status, detail)
    code = re.sub(r"[^a-z]+", "_", HTTPStatus(status).phrase.lower()).strip("_")
    return ApiError(status, code, detail, headers=headers)


async def _infrastructure_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if answer is None:
        raise error
    log.warning("%s %s: %s", request_id(request.scope), answer.code, to_printable(str(error), 500))
    return problem_response(request.scope, answer)


async def _client_gone(request: Request, error: Exception) -> Response:
    # No client reads this response; it only keeps a closed browser tab from being logged as a server error.
    return problem_response(
        request.scope, ApiError(400, "client_gone", "The connection was closed; send the request again.")
    )


def install_handlers(app: FastAPI) -> None:
    """Install handlers that return every error of `app` as problem+json."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    for kind in (sqlalchemy.exc.SQLAlchemyError, psycopg.Error, OSError, StoreUnavailable):
        app.add_exception_handler(kind, _infrastructure_error)

"""Minimal client of the Hugging Face Hub that lists and downloads files.

Not `huggingface_hub`: it has one HTTP client for the whole process, blocks, and reads responses of any size.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.datasets import HubImport
from app.api.errors import ApiError, invalid, to_printable
from app.config import hub_endpoint
from app.infra.guarded_http import AddressRefused, GuardedTransport

_MAX_LISTING_BYTES = 16 * 1024**2
_MAX_FILES = 10_000
_TOKEN_HINT = "if it is private or gated, an admin must set the secret `hf_token`"
_TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv")
_SUFFIXES = (".parquet", *_TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in _TEXT_SUFFIXES))
"""Supported file types, in order of preference."""


_CONFIG_TIMEOUT = httpx.Timeout(5.0, connect=4.0)
_COMPRESSIONS = {"gzip", "deflate", "br", "zstd"}
"""Encodings that httpx decodes without a limit."""


@dataclass(frozen=True)
class HubFile:
    """File at one commit of a dataset."""

    path: str
    url: str


class _Unusable(Exception):
    """Unusable response of the hub, with the reason."""


class ModelNotReadable(Exception):
    """The hub's answer that a model cannot be read, with a code and a sentence that says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = to_printable(message, 450)


class HubUnreachable(Exception):
    """No connection to the hub can be opened; the message is the reason."""


class _HubTransport(GuardedTransport):
    """Transport that refuses compressed responses and does not read bodies of redirects.

    httpx would expand or read them whole, and a few bytes can expand to gigabytes.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except AddressRefused as error:
            raise _Unusable(f"it redirected to {error.host}, which {error.problem}") from None
        codings = {coding.strip().lower() for coding in response.headers.get("content-encoding", "").split(",")}
        if not (response.has_redirect_location or codings & _COMPRESSIONS):
            return response
        await response.aclose()
        if response.has_redirect_location:
            return httpx.Response(response.status_code, headers={"Location": response.headers["location"]})
        raise _Unusable(f"{request.url.host} compressed its response, which was not requested")


@asynccontextmanager
async def open_client(token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the hub that follows redirects to file hosts, but not into the network of this server.

    The token is sent only to the hub: a redirect to another origin is followed without it.
    """
    endpoint = httpx.URL(hub_endpoint() or _default_endpoint())
    async with httpx.AsyncClient(
        base_url=endpoint,
        headers={"Accept-Encoding": "identity"} | ({} if token is None else {"Authorization": f"Bearer {token}"}),
        transport=_HubTransport({endpoint.raw_host.decode("ascii")}),
        timeout=httpx.Timeout(30.0),
        follow_redirects=True,
        max_redirects=5,
    ) as opened:
        try:
            yield opened
        except _Unusable as error:
            raise _bad_gateway(str(error)) from None
        except httpx.HTTPError as error:
            raise _bad_gateway(f"{type(error).__name__}: {error}") from None


async def files_of_split(client: httpx.AsyncClient, request: HubImport) -> list[HubFile]:
    """Return the files of the requested split, at the commit to which the revision currently points."""
    revision = quote(request.revision or "main", safe="")
    listing = await _fetch_json(client, f"/api/datasets/{request.hub}/revision/{revision}", request.hub)
    commit, siblings = listing.get("sha"), listing.get("siblings")
    if not isinstance(commit, str) or not re.fullmatch(r"\w{1,64}", commit) or not isinstance(siblings, list):
        raise _Unusable("its list of files has an unexpected format")
    paths = [
        item["rfilename"] for item in siblings if isinstance(item, dict) and isinstance(item.get("rfilename"), str)
    ]
    chosen = _choose_files(sorted(paths), request)
    if len(chosen) > _MAX_FILES:
        message = f"the split has {len(chosen):,} files, but at most {_MAX_FILES:,} are supported; upload larger files"
        raise _hub_error("split", "too_many_files", message)
    prefix = f"/datasets/{request.hub}/resolve/{commit}/"
    return [HubFile(path, prefix + quote(path)) for path in chosen]


async def download_file(client: httpx.AsyncClient, file: HubFile) -> AsyncIterator[bytes]:
    """Yield the bytes of a file."""
    async with client.stream("GET", file.url) as response:
        if response.status_code in (401, 403, 404):  # a gated dataset lists its files publicly
            raise _hub_error(
                "hub", "hub_dataset_not_found", f"the hub does not allow this server to read {file.path}; {_TOKEN_HINT}"
            )
        if response.status_code != 200:
            raise _Unusable(f"it returned status {response.status_code} for {file.path}")
        async for piece in response.aiter_bytes(1024 * 1024):
            yield piece


async def fetch_tokenizer(client: httpx.AsyncClient, model: str, target: Path, most_bytes: int) -> None:
    """Write the tokenizer.json of a hub model to `target`."""
    async with client.stream("GET", f"/{model}/resolve/main/tokenizer.json") as response:
        if response.status_code in (401, 403, 404):
            message = f"the hub has no model {model!r} with a tokenizer.json that this server can read; {_TOKEN_HINT}"
            raise _hub_error("tokenizer", "tokenizer_not_found", message)
        if response.status_code != 200:
            raise _Unusable(f"it returned status {response.status_code}")
        content = await _read_limited(response, most_bytes)
    await asyncio.to_thread(target.write_bytes, content)


async def fetch_model_config(client: httpx.AsyncClient, model: str, revision: str | None, most_bytes: int) -> bytes:
    """Return the config.json of a hub model.

    Raises:
        ModelNotReadable: The hub answers that this server cannot have it.
        HubUnreachable: No connection to the hub can be opened.
    """
    url = f"/{model}/resolve/{quote(revision or 'main', safe='')}/config.json"
    try:
        async with client.stream("GET", url, timeout=_CONFIG_TIMEOUT) as response:
            if response.status_code in (401, 403, 404):
                raise _not_readable(response, model, revision)
            if response.status_code != 200:
                raise _Unusable(f"it returned status {response.status_code}")
            return await _read_limited(response, most_bytes)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise HubUnreachable(to_printable(str(error) or type(error).__name__, 200)) from error


def _not_readable(response: httpx.Response, model: str, revision: str | None) -> ModelNotReadable:
    """Return the error for a refusal, of which the hub names the reason in a header."""
    token = "let an admin set the token of an account with access (`anneal secrets set hf_token`)"
    if "invalid credentials" in response.headers.get("x-error-message", "").lower():
        return ModelNotReadable(
            "hub_token_refused",
            "the hub refuses the secret `hf_token`, with which it gives no model: let an admin set a valid one, or "
            "delete it (`anneal secrets delete hf_token`)",
        )
    match response.headers.get("x-error-code"):
        case "GatedRepo":
            return ModelNotReadable(
                "hub_model_gated",
                f"the model {model!r} of the hub is gated: accept the conditions on its page, and {token}",
            )
        case "RevisionNotFound":
            return ModelNotReadable(
                "hub_revision_not_found",
                f"the hub's model {model!r} has no revision {revision or 'main'!r}: correct `revision`, or "
                "leave it out",
            )
        case "EntryNotFound":
            return ModelNotReadable(
                "hub_model_not_found",
                f"the hub's repository {model!r} has no config.json, so it is no model in the format of transformers: "
                "name one that is",
            )
        case _:
            return ModelNotReadable(
                "hub_model_not_found",
                f"the hub has no model {model!r} with a config.json that this server can read: correct the name; if it "
                f"is private or gated, {token}",
            )


def _choose_files(paths: list[str], request: HubImport) -> list[str]:
    """Return the files whose names contain the split as a word, in the folder or with the name of the subset."""
    readable = [path for path in paths if path.endswith(_SUFFIXES)]
    ways: tuple[Callable[[str], bool], ...] = (
        # `train_sft` is a separate split, unless no other file matches `train`.
        lambda path: _has_word(Path(path).stem, request.split, "-. "),
        lambda path: request.split in path.split("/")[:-1],
        lambda path: _has_word(Path(path).stem, request.split, "-._ 0-9"),
        lambda path: request.split == "train" and readable == [path],
    )
    fitting: list[str] = next((matching for way in ways if (matching := [path for path in readable if way(path)])), [])
    if request.subset is not None:
        fitting = [path for path in fitting if _has_word(path, request.subset, "-._ /")]
    for suffix in _SUFFIXES:
        if matching := [path for path in fitting if path.endswith(suffix)]:
            break
    else:
        available = ", ".join(path for path in paths if not path.startswith("."))
        message = (
            f"no file of {request.hub} has rows of this split (Parquet, or JSONL, JSON and CSV, also as .gz); it has "
            f"{available[:200]}"
        )
        raise _hub_error("split", "split_not_found", message)
    folders = sorted({path.rpartition("/")[0] for path in matching})
    if len(folders) > 1:
        names = ", ".join(f"`{folder or '.'}`" for folder in folders[:20])
        raise _hub_error("subset", "subset_needed", f"the split is in several folders ({names}); name one as `subset`")
    return matching


def _has_word(text: str, word: str, borders: str) -> bool:
    return re.search(rf"(?:^|[{borders}]){re.escape(word)}(?:$|[{borders}])", text) is not None


async def _fetch_json(client: httpx.AsyncClient, url: str, name: str) -> dict[str, Any]:
    async with client.stream("GET", url) as response:
        if response.status_code in (401, 403, 404):
            message = f"the hub has no dataset {name!r} at this revision that this server can read; {_TOKEN_HINT}"
            raise _hub_error("hub", "hub_dataset_not_found", message)
        if response.status_code != 200:
            raise _Unusable(f"it returned status {response.status_code}")
        content = await _read_limited(response, _MAX_LISTING_BYTES)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _Unusable("its response is not JSON")
    return value


async def _read_limited(response: httpx.Response, most_bytes: int) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes(64 * 1024):
        content += piece
        if len(content) > most_bytes:
            raise _Unusable(f"its response has more than {most_bytes:,} bytes")
    return bytes(content)


def _default_endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _hub_error(field: str, code: str, message: str) -> ApiError:
    return invalid([FieldError(field=field, code=code, message=to_printable(message, 450))], code=code)


def _bad_gateway(why: str) -> ApiError:
    detail = (
        f"The hub could not be used ({to_printable(why, 200)}). Try again later, or do without it: upload the "
        "dataset's file, or put the model's folder below ANNEAL_MODELS_ROOT."
    )
    return ApiError(502, "hub_unusable", detail)

"""Files of the Hugging Face hub, fetched over the few of its calls that are needed."""

import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from app.config import hub_endpoint
from app.datasets.schemas import HubImport
from app.errors import ApiError, FieldError, clean, invalid
from app.outgoing import is_public

_MOST_LISTING_BYTES = 16 * 1024**2
_MOST_FILES = 10_000
_TOKEN = "for a private or gated one, an admin sets the secret `hf_token`"
_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")
"""Kinds of files that can be read, the one to prefer first."""


@dataclass(frozen=True)
class HubFile:
    """A file at one commit of a data set."""

    path: str
    url: str


class _Unusable(Exception):
    """What the hub answers cannot be used, and why."""


class _Guarded(httpx.AsyncBaseTransport):
    """Connects to the hub, to a proxy where the environment names one for a URL, and else to the internet alone.

    An address is judged, and then that very address connected to: a name may have another one a moment later.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._tls = httpx.create_ssl_context()
        self._opened: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if proxy := _proxy_of(request.url):
            # It is the proxy that decides who can be reached.
            return await self._transport(f"proxy {proxy}", proxy).handle_async_request(request)
        if host == self._hub:
            return await self._transport(host).handle_async_request(request)
        failed: httpx.TransportError | None = None
        for address in await _public_addresses(host):
            there = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return await self._transport(host).handle_async_request(there)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error
        raise failed or _Unusable(f"it led to {host}, which cannot be found")

    async def aclose(self) -> None:
        for transport in self._opened.values():
            await transport.aclose()

    def _transport(self, name: str, proxy: str | None = None) -> httpx.AsyncHTTPTransport:
        """One for each name: a connection whose certificate is of one host is not used for another."""
        if name not in self._opened:
            self._opened[name] = httpx.AsyncHTTPTransport(verify=self._tls, proxy=proxy)
        return self._opened[name]


def _proxy_of(url: httpx.URL) -> str | None:
    """The proxy that the environment names for a URL, unless NO_PROXY names its host."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


async def _public_addresses(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        raise _Unusable(f"it led to {host}, which cannot be found") from None
    addresses = list(dict.fromkeys(str(item[4][0]) for item in found))
    if not all(is_public(address) for address in addresses):
        raise _Unusable(f"it led to {host}, which has an address of a private network")
    return addresses


@asynccontextmanager
async def client(token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the hub; follows it to where its files lie, but not into the network of this server.

    The token goes to the hub alone: a redirect to another origin is followed without it.
    """
    endpoint = httpx.URL(hub_endpoint() or _usual_endpoint())
    async with httpx.AsyncClient(
        base_url=endpoint,
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        transport=_Guarded(endpoint.host),
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
    """The files of the split that is asked for, at the commit that its revision names now."""
    revision = quote(request.revision or "main", safe="")
    listing = await _json(client, f"/api/datasets/{request.hub}/revision/{revision}", request.hub)
    commit, siblings = listing.get("sha"), listing.get("siblings")
    if not isinstance(commit, str) or not re.fullmatch(r"\w{1,64}", commit) or not isinstance(siblings, list):
        raise _Unusable("its list of files has another form than expected")
    paths = [
        item["rfilename"] for item in siblings if isinstance(item, dict) and isinstance(item.get("rfilename"), str)
    ]
    chosen = _choose(sorted(paths), request)
    if len(chosen) > _MOST_FILES:
        message = f"the split has {len(chosen):,} files, and {_MOST_FILES:,} is the most; upload it in larger ones"
        raise _refused("split", "too_many_files", message)
    prefix = f"/datasets/{request.hub}/resolve/{commit}/"
    return [HubFile(path, prefix + quote(path)) for path in chosen]


async def download(client: httpx.AsyncClient, file: HubFile) -> AsyncIterator[bytes]:
    """The bytes of a file."""
    async with client.stream("GET", file.url) as response:
        if response.status_code in (401, 403, 404):  # a gated one lists its files to everybody
            raise _refused(
                "hub", "hub_dataset_not_found", f"the hub does not let this server read {file.path}; {_TOKEN}"
            )
        if response.status_code != 200:
            raise _Unusable(f"it answered {response.status_code} for {file.path}")
        async for piece in response.aiter_bytes(1024 * 1024):
            yield piece


async def fetch_tokenizer(client: httpx.AsyncClient, model: str, target: Path, most_bytes: int) -> None:
    """Write the tokenizer.json of a hub model to `target`."""
    async with client.stream("GET", f"/{model}/resolve/main/tokenizer.json") as response:
        if response.status_code in (401, 403, 404):
            message = f"the hub has no model {model!r} with a tokenizer.json that this server may read; {_TOKEN}"
            raise _refused("tokenizer", "tokenizer_not_found", message)
        if response.status_code != 200:
            raise _Unusable(f"it answered {response.status_code}")
        content = await _read(response, most_bytes)
    await asyncio.to_thread(target.write_bytes, content)


def _choose(paths: list[str], request: HubImport) -> list[str]:
    """The files whose names hold the split as a word, below or named after the subset."""
    readable = [path for path in paths if path.endswith(_SUFFIXES)]
    ways: tuple[Callable[[str], bool], ...] = (
        # `train_sft` is a split of its own, unless there is nothing else that `train` can mean.
        lambda path: _has_word(Path(path).stem, request.split, "-. "),
        lambda path: request.split in path.split("/")[:-1],
        lambda path: _has_word(Path(path).stem, request.split, "-._ 0-9"),
        lambda path: request.split == "train" and readable == [path],
    )
    fitting: list[str] = next((found for way in ways if (found := [path for path in readable if way(path)])), [])
    if request.subset is not None:
        fitting = [path for path in fitting if _has_word(path, request.subset, "-._ /")]
    for suffix in _SUFFIXES:
        if found := [path for path in fitting if path.endswith(suffix)]:
            break
    else:
        there = ", ".join(path for path in paths if not path.startswith("."))
        message = f"no file of {request.hub} has rows of this split (JSONL, JSON, CSV, Parquet); it has {there[:200]}"
        raise _refused("split", "split_not_found", message)
    folders = sorted({path.rpartition("/")[0] for path in found})
    if len(folders) > 1:
        names = ", ".join(f"`{folder or '.'}`" for folder in folders[:20])
        raise _refused("subset", "subset_needed", f"the split lies in several folders ({names}); name one as `subset`")
    return found


def _has_word(text: str, word: str, borders: str) -> bool:
    return re.search(rf"(?:^|[{borders}]){re.escape(word)}(?:$|[{borders}])", text) is not None


async def _json(client: httpx.AsyncClient, url: str, name: str) -> dict[str, Any]:
    async with client.stream("GET", url) as response:
        if response.status_code in (401, 403, 404):
            message = f"the hub has no data set {name!r} at this revision that this server may read; {_TOKEN}"
            raise _refused("hub", "hub_dataset_not_found", message)
        if response.status_code != 200:
            raise _Unusable(f"it answered {response.status_code}")
        content = await _read(response, _MOST_LISTING_BYTES)
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise _Unusable("its answer is not JSON")
    return told


async def _read(response: httpx.Response, most_bytes: int) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes(64 * 1024):
        content += piece
        if len(content) > most_bytes:
            raise _Unusable(f"its answer has more than {most_bytes:,} bytes")
    return bytes(content)


def _usual_endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _refused(field: str, code: str, message: str) -> ApiError:
    return invalid([FieldError(field=field, code=code, message=clean(message, 450))], code=code)


def _bad_gateway(why: str) -> ApiError:
    detail = f"The hub could not be used ({clean(why, 200)}); try again later, or upload the file yourself."
    return ApiError(502, "hub_unusable", detail)

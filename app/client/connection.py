"""Where the service is, and the key to it: what is given, else ANNEAL_URL and ANNEAL_API_KEY, else the local one."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from app.client.errors import AnnealError
from app.config import ClientSettings
from app.home import read_json


@dataclass(frozen=True)
class Connection:
    """A service that calls can be sent to."""

    url: str
    key: str = field(repr=False)


def find_connection(settings: ClientSettings, url: str | None = None, key: str | None = None) -> Connection:
    """The service to talk to.

    Raises:
        AnnealError: `no_connection`, with what to do.
    """
    url, key = url or settings.url, key or settings.api_key
    local = read_json(settings.connection_file) or {}
    local_url, local_key = _plain(local.get("url")), local.get("api_key")
    if url is None and local_url:
        url = local_url
    if url is None:
        raise AnnealError(
            "no_connection",
            f"No service is known: none runs on {settings.home}. Start one with `anneal up`, or set ANNEAL_URL and "
            "ANNEAL_API_KEY to one that runs elsewhere.",
        )
    url = _plain(url)
    if not _is_address(url):
        raise AnnealError("no_connection", f"{url} is no address of a service: write ANNEAL_URL as http://host:8700.")
    # The local key goes nowhere but to the local service.
    key = key or (local_key if url == local_url else None)
    if not key:
        raise AnnealError(
            "no_connection",
            f"No key for {url} is known: make one there with `anneal keys create`, and set ANNEAL_API_KEY to it.",
        )
    if not key.isascii() or not key.isprintable():
        raise AnnealError("no_connection", "ANNEAL_API_KEY is no key: copy it again from `anneal keys create`.")
    return Connection(url, key)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or half a bracket
        return False


def _plain(url: str | None) -> str:
    return (url or "").rstrip("/").removesuffix("/v1")

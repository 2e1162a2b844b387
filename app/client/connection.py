"""URL and API key of the service: from arguments, else ANNEAL_URL and ANNEAL_API_KEY, else the local service."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from app.client.errors import AnnealError
from app.config import ClientSettings
from app.infra.private_files import read_json


@dataclass(frozen=True)
class Connection:
    """URL and API key of a service."""

    url: str
    key: str = field(repr=False)


def find_connection(settings: ClientSettings, url: str | None = None, key: str | None = None) -> Connection:
    """Find the service to connect to.

    Raises:
        AnnealError: `no_connection`: the URL or the key is missing or invalid.
    """
    url, key = url or settings.url, key or settings.api_key
    local = read_json(settings.connection_file) or {}
    local_url, local_key = _plain(local.get("url")), local.get("api_key")
    if url is None and local_url:
        url = local_url
    if url is None:
        raise AnnealError(
            "no_connection",
            f"No service found: none runs in {settings.home}. Start one with `anneal up`, or set ANNEAL_URL and "
            "ANNEAL_API_KEY to use a remote service.",
        )
    url = _plain(url)
    if not _is_address(url):
        raise AnnealError(
            "no_connection", f"{url} is not a valid URL of a service: set ANNEAL_URL to a URL such as http://host:8700."
        )
    # The local key must not be sent to any other service.
    key = key or (local_key if url == local_url else None)
    if not key:
        raise AnnealError(
            "no_connection",
            f"No API key for {url}: create one there with `anneal keys create`, and set ANNEAL_API_KEY to it.",
        )
    if not key.isascii() or not key.isprintable():
        raise AnnealError(
            "no_connection", "ANNEAL_API_KEY is not a valid key: copy it again from `anneal keys create`."
        )
    return Connection(url, key)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for an invalid port or an unmatched bracket
        return False


def _plain(url: str | None) -> str:
    return (url or "").rstrip("/").removesuffix("/v1")

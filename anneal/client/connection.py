"""URL and API key of the service: from arguments, else ANNEAL_URL and ANNEAL_API_KEY, else the local service."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from anneal.client.errors import AnnealError
from anneal.local_service import is_held, read_json
from anneal.settings import ClientSettings


@dataclass(frozen=True)
class Connection:
    """URL of a service, and the source of the API key for it."""

    url: str
    key: Callable[[], str] = field(repr=False)
    ca_file: Path | None = None
    """Certificates of the authorities to verify the service with; None: those of the system."""

    def authorize(self, request: httpx.Request) -> httpx.Request:
        """Add the key to a request."""
        request.headers["Authorization"] = f"Bearer {self.key()}"
        return request


class LocalKey:
    """Key of the service of this machine, which has a new one at each start; read for each request.

    While the service does not run, any user of the machine may listen on its port. So the key is sent only while
    `anneal up` holds the lock of the home: it then holds the port as well.
    """

    def __init__(self, settings: ClientSettings, url: str) -> None:
        self._settings = settings
        self._url = url

    def __call__(self) -> str:
        """Return the key; raise AnnealError `unreachable` while the service does not run or has not started."""
        if is_held(self._settings.home):
            local = read_json(self._settings.connection_file) or {}
            if local.get("api_key") and _strip_version(local.get("url")) == self._url:
                return str(local["api_key"])
        raise AnnealError(
            "unreachable",
            f"The service at {self._url} does not run or is still starting: start it with `anneal up`, or set "
            "ANNEAL_URL and ANNEAL_API_KEY to another service.",
        )


def find_connection(
    settings: ClientSettings, url: str | None = None, key: str | None = None, ca_file: str | Path | None = None
) -> Connection:
    """Find the service to connect to.

    Raises:
        AnnealError: `no_connection`: the URL or the key is missing or invalid.
    """
    url, key = url or settings.url, key or settings.api_key
    authorities = settings.ca_file if ca_file is None else Path(ca_file)
    local_url = _strip_version((read_json(settings.connection_file) or {}).get("url"))
    if url is None and local_url and is_held(settings.home):
        url = local_url
    if url is None and is_held(settings.home):
        raise AnnealError(
            "no_connection",
            f"The service in {settings.home} is still starting: try again once `anneal up` says that it is ready.",
        )
    if url is None:
        raise AnnealError(
            "no_connection",
            f"No service found: none runs in {settings.home}. Start one with `anneal up`, or set ANNEAL_URL and "
            "ANNEAL_API_KEY to use a remote service.",
        )
    url = _strip_version(url)
    if not _is_address(url):
        raise AnnealError(
            "no_connection", f"{url} is not a valid URL of a service: set ANNEAL_URL to a URL such as http://host:8700."
        )
    if not key and url == local_url:
        return Connection(url, LocalKey(settings, url), authorities)
    if not key:
        raise AnnealError(
            "no_connection",
            f"No API key for {url}: create one there with `anneal keys create`, and set ANNEAL_API_KEY to it.",
        )
    if not key.isascii() or not key.isprintable():
        raise AnnealError(
            "no_connection", "ANNEAL_API_KEY is not a valid key: copy it again from `anneal keys create`."
        )
    return Connection(url, lambda: key, authorities)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for an invalid port or an unmatched bracket
        return False


def _strip_version(url: str | None) -> str:
    return (url or "").rstrip("/").removesuffix("/v1")

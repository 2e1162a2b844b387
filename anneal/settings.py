"""Settings of clients, and those that they share with the service."""

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class HomeSettings(BaseSettings):
    """Settings that servers and clients share."""

    model_config = SettingsConfigDict(
        env_prefix="ANNEAL_",
        # Compose passes a variable that `.env` leaves empty as an empty one.
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        validate_default=True,
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".anneal")
    """Folder of the embedded servers' data, `connection.json`, and the storage unless `storage` is set."""

    @field_validator("home")
    @classmethod
    def _make_absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @property
    def connection_file(self) -> Path:
        """File in which a running `anneal up` publishes its URL, key and process ids (mode 0600)."""
        return self.home / "connection.json"


class ClientSettings(HomeSettings):
    """Service address and key used by the command line and the Python client by default."""

    url: str | None = None
    """URL of the service; unset: the URL in `connection.json`."""
    api_key: str | None = Field(default=None, repr=False)
    """API key, as printed by `anneal keys create`."""
    ca_file: Path | None = None
    """File with the certificates of the authorities (PEM) that signed the certificate of a service with a private one;
    unset: SSL_CERT_FILE, else the public authorities."""

    @field_validator("ca_file")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy to use for `url`; None if there is none, or NO_PROXY names its host.

    NO_PROXY may have names, and networks such as `10.0.0.0/8`.
    """
    import urllib.request  # slow, and only some calls need it

    proxies = urllib.request.getproxies()
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]) or urllib.request.proxy_bypass(host):
        return None
    if _is_in_network(host, proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_in_network(host: str, no_proxy: str) -> bool:
    """Return True if the host is an address in one of the networks of NO_PROXY, such as `10.0.0.0/8`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in no_proxy.split(","):
        try:
            if address in ipaddress.ip_network(entry.strip().replace("[", "").replace("]", ""), strict=False):
                return True
        except ValueError:
            continue  # a name
    return False

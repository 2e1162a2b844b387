"""Addresses that webhooks may call: public HTTPS ones, and hosts that the operator allows."""

import asyncio
import ipaddress
from collections.abc import Collection

from anneal.contracts.errors import FieldError
from anneal.settings import proxy_of
from app.api.errors import to_printable

_LOOKUP_SECONDS = 4.0


async def find_problem(url: str, private_hosts: Collection[str]) -> FieldError | None:
    """Return what is wrong with the URL of a webhook, or None.

    A name that cannot be resolved now is accepted, since each attempt resolves it and checks its addresses again.
    """
    import httpx  # slow, and only webhooks need it

    from app.infra.guarded_http import AddressRefused, public_addresses

    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii")
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return _problem("invalid_url", "is not a URL; write it as https://hooks.example.com/path")
    is_port = parsed.port is None or 0 < parsed.port < 65536
    if parsed.scheme not in ("https", "http") or not host or not is_port or any(map(str.isspace, url)):
        return _problem("invalid_url", "is not a URL of a web server; write it as https://hooks.example.com/path")
    if parsed.userinfo or parsed.fragment:
        return _problem("invalid_url", "has a user, a password or a fragment (`#…`); leave them out")
    if host in private_hosts:
        return None
    if parsed.scheme == "http":
        return _problem("not_https", f"is not encrypted; use https://, or {_ask_operator(host)}")
    if proxy_of(url) and not _is_address(host):
        return None  # the proxy resolves the name, and decides which hosts are reachable
    try:
        await asyncio.wait_for(public_addresses(host), _LOOKUP_SECONDS)
    except AddressRefused as error:
        if "private" in error.problem:
            message = f"leads to {to_printable(host, 100)}, which {error.problem}; use a public one, or"
            return _problem("private_address", f"{message} {_ask_operator(host)}")
    except TimeoutError:
        pass
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _problem(code: str, message: str) -> FieldError:
    return FieldError(field="url", code=code, message=message)


def _ask_operator(host: str) -> str:
    return f"let the operator add {to_printable(host, 100)} to ANNEAL_WEBHOOK_PRIVATE_HOSTS"

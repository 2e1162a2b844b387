"""Checks of `Host` and `Origin` headers, against DNS rebinding and CSRF."""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.authorization import is_public
from app.api.errors import ApiError, problem_response, to_printable
from app.config import Settings

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
_SAFE = {"GET", "HEAD", "OPTIONS"}


class HostGuardMiddleware:
    """Middleware that rejects unknown `Host` headers and write requests from other origins."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        extra = {name.strip().lower().removesuffix(".") for name in settings.allowed_hosts.split(",") if name.strip()}
        self.allowed = _LOOPBACK | {settings.host.lower()} | extra
        self.any_address = settings.host in ("0.0.0.0", "::")
        self.foreign_origins = frozenset(settings.foreign_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Health probes send the address of the container as Host, and /healthz reveals nothing.
        if scope["type"] == "http" and scope["path"] != "/healthz":
            refused = self._check_host(scope)
            if refused is not None:
                await problem_response(scope, refused)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed(_host_name(hosts[0])):
            host = to_printable(hosts[0], 80) if hosts else "(none)"
            return ApiError(
                400,
                "host_not_allowed",
                f"The host {host} is not allowed; to allow it, add it to ANNEAL_ALLOWED_HOSTS on the server.",
            )
        origins = headers.getlist("origin")
        if not origins or scope["method"] in _SAFE:
            return None
        origin = ", ".join(origins)
        # Behind a proxy that terminates TLS, this server sees http while the page uses https.
        if origin.lower() in {f"{scheme}://{hosts[0]}".lower() for scheme in (scope["scheme"], "https")}:
            return None
        # A page of an allowed origin needs a key: browsers send no cookie of this service with its requests.
        # Signing in stays with our own pages: browsers would keep the cookie that another page of this host causes.
        if origin in self.foreign_origins and "authorization" in headers and not is_public(scope):
            return None
        return ApiError(
            403,
            "origin_not_allowed",
            f"Write requests from pages of {to_printable(origin, 80)} are not allowed; open the page from this server, "
            "or send an API key from an origin of ANNEAL_ALLOWED_ORIGINS.",
        )

    def _is_allowed(self, name: str) -> bool:
        if name in self.allowed:
            return True
        if not name or not self.any_address:
            return False
        # When bound to all addresses of the machine, accept literal addresses: only names can be rebound.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _host_name(host: str) -> str:
    """Return the host without port and trailing dot (`[::1]:80` is `::1`), or an empty string if it is invalid."""
    match = _HOST.fullmatch(host.lower())
    return (match["six"] or match["name"].removesuffix(".")) if match else ""

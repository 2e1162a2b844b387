"""HTTP transport for addresses that users choose: it connects to public addresses only."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import httpx

from anneal.settings import proxy_of

_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
# uvloop has four threads for all lookups of the process, which a few names without an answer would keep from the rest.
_lookups = ThreadPoolExecutor(64, "lookup")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefused(Exception):
    """Raised instead of a connection: `host` is the name, and `problem` what is wrong with it, such as `has …`."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"{host} {problem}")
        self.host = host
        self.problem = problem


@cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context of all clients: reading it takes 30 ms, in which the event loop serves no request."""
    return httpx.create_ssl_context()


class GuardedTransport(httpx.AsyncBaseTransport):
    """HTTP transport that connects only to allowed hosts, to a proxy from the environment, or to public addresses.

    It resolves a name once, checks the address and connects to that address, because a second lookup could return
    a different one (DNS rebinding). Raises `AddressRefused`.
    """

    def __init__(self, allowed_hosts: Collection[str]) -> None:
        self._allowed_hosts = allowed_hosts
        self._tls = tls_context()
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.raw_host.decode("ascii")
        if proxy := proxy_of(str(request.url)):
            # The proxy decides which hosts are reachable.
            return await self._transport_of(f"proxy {proxy}", proxy).handle_async_request(request)
        if host in self._allowed_hosts:
            return await self._transport_of(host).handle_async_request(request)
        failed: httpx.TransportError | None = None
        for address in await public_addresses(host):
            direct = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return await self._transport_of(host).handle_async_request(direct)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error
        raise failed or AddressRefused(host, "cannot be resolved")

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()

    def _transport_of(self, name: str, proxy: str | None = None) -> httpx.AsyncHTTPTransport:
        """Return the transport of a host name; separate ones keep connections from being reused for another host."""
        if name not in self._transports:
            self._transports[name] = httpx.AsyncHTTPTransport(verify=self._tls, proxy=proxy)
        return self._transports[name]


async def public_addresses(host: str) -> list[str]:
    """Return the addresses of a host; raises `AddressRefused` if one of them is not public, or there is none."""
    try:
        lookup = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        resolved = await asyncio.get_running_loop().run_in_executor(_lookups, lookup)
    except (OSError, UnicodeError):
        raise AddressRefused(host, "cannot be resolved") from None
    addresses = list(dict.fromkeys(str(item[4][0]) for item in resolved))
    if not all(is_public(address) for address in addresses):
        raise AddressRefused(host, "has a private network address")
    return addresses


def is_public(address: str) -> bool:
    """Return True if an address is public, and so is any IPv4 address embedded in it."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if ip.version == 6:
        inside = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inside = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inside is not None:
            return is_public(str(inside))
        if ip.is_site_local:  # deprecated, but networks still route it
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and ip not in _PROTOCOLS

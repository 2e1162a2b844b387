"""Proxy of the environment for a URL (`HTTPS_PROXY`, `NO_PROXY` and so on), also for networks in NO_PROXY."""

import ipaddress
import urllib.request
from urllib.parse import urlsplit


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy to use for `url`; None if there is none, or NO_PROXY names its host."""
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

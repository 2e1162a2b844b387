"""Check of outgoing connections: untrusted URLs may lead only to public addresses (protection against SSRF)."""

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")


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
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and ip not in _PROTOCOLS

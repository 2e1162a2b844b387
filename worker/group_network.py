"""Network over which training processes of several hosts meet."""

import ipaddress
import socket

import psutil

from app.infra.errors import SetupError


def address_of(interface: str) -> str:
    """Return the address of a network interface: IPv4 if it has one, else a global one of IPv6.

    Raises:
        SetupError: There is no such interface, or it has no address.
    """
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise SetupError(f"ANNEAL_GROUP_INTERFACE={interface}: this machine has no such interface, but {known}")
    found = interfaces[interface]
    for one in found:
        if one.family == socket.AF_INET:
            return one.address
    for one in found:
        if one.family == socket.AF_INET6 and not ipaddress.ip_address(one.address.partition("%")[0]).is_link_local:
            return one.address
    raise SetupError(f"ANNEAL_GROUP_INTERFACE={interface}: the interface has no address; name another one")


class MeetingPort:
    """Port of an address that is kept free for rank 0 until it listens there, which may be at any time."""

    def __init__(self, address: str) -> None:
        """Reserve a free port; raise OSError if the address is no longer this machine's."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Without listening, so that another socket with this option may listen on the same port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        self.meeting = f"tcp://{address}:{self._socket.getsockname()[1]}"
        """Place at which the ranks meet, as `RankPlace` has it."""

    def close(self) -> None:
        """Release the port."""
        self._socket.close()

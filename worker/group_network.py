"""Network over which training processes of several hosts meet."""

import ipaddress
import logging
import socket
import threading
import time
from typing import Self

import psutil

from app.infra.errors import SetupError
from app.infra.logs.log_setup import with_current_context

log = logging.getLogger(__name__)

_JOIN_SECONDS = 1.0


def address_of(interface: str) -> str:
    """Return the address of a network interface: IPv4 if it has one, else a global one of IPv6.

    Raises:
        SetupError: There is no such interface, or it has no address.
    """
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise SetupError(f"ANNEAL_GROUP_INTERFACE={interface}: this machine has no such interface, but {known}")
    addresses = interfaces[interface]
    for address in addresses:
        if address.family == socket.AF_INET:
            return address.address
    for address in addresses:
        if (
            address.family == socket.AF_INET6
            and not ipaddress.ip_address(address.address.partition("%")[0]).is_link_local
        ):
            return address.address
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


class MeetingWatch:
    """Checks from a thread whether the host of rank 0 can still be reached over the network of the group.

    Without it, ranks whose network is cut wait until the hang watch ends the run: the kernel keeps a silent connection
    for a quarter of an hour or longer. Nothing is sent; a connection that is made, or refused by that host, is enough.
    """

    def __init__(self, meeting: tuple[str, int], source: str, every: float) -> None:
        """Look every `every` seconds, from the address `source` of this worker."""
        self._meeting = meeting
        self._source = source
        self._every = every
        self._reached_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=with_current_context(self._watch_meeting), name="group network", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """Seconds since that host was last reached."""
        return time.monotonic() - self._reached_at

    def _watch_meeting(self) -> None:
        while not self._over.wait(self._every):
            began = time.monotonic()
            try:
                with socket.create_connection(self._meeting, self._every, (self._source, 0)):
                    self._reached_at = began
            except ConnectionRefusedError:
                self._reached_at = began  # rank 0 has ended, and its host has answered
            except OSError as error:
                log.info("rank 0 cannot be reached at %s, port %d: %s", *self._meeting, error)

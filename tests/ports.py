"""Free ports on the loopback interface."""

import random
import socket

# Below the kernel's ephemeral range: an outgoing connection must not occupy the port of a server that restarts.
_PORTS = range(20000, 32000)


def free_port() -> int:
    """Return a port that a server can listen on now."""
    # Use the system's generator: two processes with the same Python seed would pick the same ports.
    return next(port for port in random.SystemRandom().sample(_PORTS, 200) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: ignore connections of a previous server that are still closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

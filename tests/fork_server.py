"""Servers that have imported much and fork a copy of themselves for each connection: imports once for all processes."""

import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def connect(
    path: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Connect to a copy of the server at `path`; start `command path` if none listens, and return its process too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connected(path), None
        except (FileNotFoundError, ConnectionRefusedError):  # there is none yet, or the one that was has ended
            path.unlink(missing_ok=True)
        server = subprocess.Popen(
            [*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert server.stdout is not None
        assert server.stdout.read(1), "the server listens"
        server.stdout.close()
        return _connected(path), server


def end(server: subprocess.Popen[bytes]) -> None:
    """End a server; its copies go on until their connections end."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=30)


def serve(path: str) -> socket.socket:
    """Listen, and return each connection in a copy of this process; exit when standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no copy is waited for
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(path)
        listening.listen()
        os.write(1, b"\n")
        os.dup2(2, 1)
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while [key.fileobj for key, _ in selector.select()] == [listening]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return connection
            connection.close()
    sys.exit()


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection

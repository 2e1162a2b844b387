"""TCP proxies between a process and an embedded server, which can reset, delay and hold back traffic."""

import asyncio
import contextlib
import multiprocessing
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from sqlalchemy.engine import make_url

from app.standalone.postgres import SOCKET

_CHUNK = 64 * 1024


class Proxies:
    """All proxies of a campaign, in a separate process.

    In the process of the clients they would wait for the GIL, on a slow machine long enough for a lease to expire.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), name="proxies", daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def to(self, url: str, host: str = "127.0.0.1") -> "Proxy":
        """Create a proxy to an embedded server, which listens on an address of this machine."""
        parts = urlsplit(url)
        path = unquote(parts.path) if parts.scheme == "unix" else f"{parse_qs(parts.query)['host'][0]}/{SOCKET}"
        number, port = self.ask("add", path, host)
        if parts.scheme == "unix":
            return Proxy(self, number, f"redis://:{parts.password}@{host}:{port}/0")
        changed = make_url(url).difference_update_query(["host", "port"]).set(host=host, port=port)
        return Proxy(self, number, changed.render_as_string(hide_password=False))

    def close(self) -> None:
        """Stop all proxies."""
        self._ours.close()
        self._process.join(10)

    def ask(self, *command: Any) -> Any:
        """Send a command to the proxy process and return its result."""
        with self._lock:
            self._ours.send(command)
            return self._ours.recv()


class Proxy:
    """Proxy to one server, which is reached by `url`. Its methods are thread-safe."""

    def __init__(self, all_of_them: Proxies, number: int, url: str) -> None:
        self.url = url
        self._all = all_of_them
        self._number = number

    @property
    def swallowed(self) -> int:
        """Number of bytes that were held back while the proxy was silent."""
        return int(self._all.ask("swallowed", self._number))

    @property
    def delayed(self) -> int:
        """Number of delayed bytes."""
        return int(self._all.ask("delayed", self._number))

    def fall_silent(self) -> None:
        """Hold back all traffic: connections stay open, and new ones are accepted but not forwarded."""
        self._all.ask("fall_silent", self._number)

    def delay(self, seconds: float) -> None:
        """Delay all traffic by `seconds`."""
        self._all.ask("delay", self._number, seconds)

    def heal(self) -> None:
        """Forward all traffic again, including what was held back."""
        self._all.ask("heal", self._number)

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        self._all.ask("cut", self._number)


def _run(commands: Connection) -> None:
    asyncio.run(_serve(commands))


async def _serve(commands: Connection) -> None:
    """Execute commands until the campaign closes the pipe."""
    ways: list[_Way] = []
    loop = asyncio.get_running_loop()
    while True:
        try:
            verb, *arguments = await loop.run_in_executor(None, commands.recv)
        except (EOFError, OSError):
            return
        if verb == "add":
            way = _Way(*arguments)
            await way.start()
            ways.append(way)
            commands.send((len(ways) - 1, way.port))
            continue
        number, *rest = arguments
        handler = getattr(ways[number], verb)
        commands.send(handler(*rest) if callable(handler) else handler)


class _Way:
    """Proxy implementation, in the proxy process."""

    def __init__(self, target: str, host: str) -> None:
        self.port = 0
        self._host = host
        self.swallowed = 0
        self.delayed = 0
        self._target = target
        self._seconds = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def fall_silent(self) -> None:
        self._open.clear()

    def delay(self, seconds: float) -> None:
        self._seconds = seconds

    def heal(self) -> None:
        self._seconds = 0.0
        self._open.set()

    def cut(self) -> None:
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                # A linger time of zero makes the close a reset.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # the server is down or the connection was cut: also close the near end
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if not self._open.is_set():
                self.swallowed += len(data)
                await self._open.wait()
            if self._seconds:
                self.delayed += len(data)
                await asyncio.sleep(self._seconds)
            writer.write(data)
            await writer.drain()
        # One end closed, so close the other.
        writer.close()

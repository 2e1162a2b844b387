"""A TCP proxy between one process and one server, which can cut, delay and swallow."""

import asyncio
import contextlib
import multiprocessing
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

_CHUNK = 64 * 1024


class Proxies:
    """All proxies of a campaign, in a process of their own.

    In that of the clients they would wait for the interpreter behind all of these, and on a slow machine long enough
    for a lease to run out.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), name="proxies", daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def to(self, port: int) -> "Proxy":
        """A new proxy to a port of this machine."""
        number, own = self.ask("add", port)
        return Proxy(self, number, own)

    def close(self) -> None:
        """End all."""
        self._ours.close()
        self._process.join(10)

    def ask(self, *command: Any) -> Any:
        """Have the other process do something, and wait until it has."""
        with self._lock:
            self._ours.send(command)
            return self._ours.recv()


class Proxy:
    """One way to a server. Its methods may be called from any thread."""

    def __init__(self, all_of_them: Proxies, number: int, port: int) -> None:
        self.port = port
        self._all = all_of_them
        self._number = number

    @property
    def swallowed(self) -> int:
        """Bytes that were kept back while it was silent."""
        return int(self._all.ask("swallowed", self._number))

    @property
    def delayed(self) -> int:
        """Bytes that came late."""
        return int(self._all.ask("delayed", self._number))

    def fall_silent(self) -> None:
        """As a pulled cable: connections stay, nothing passes, new ones are taken and lead nowhere."""
        self._all.ask("fall_silent", self._number)

    def delay(self, seconds: float) -> None:
        """Everything comes this much later."""
        self._all.ask("delay", self._number, seconds)

    def heal(self) -> None:
        """Pass everything again, what was kept back included."""
        self._all.ask("heal", self._number)

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        self._all.ask("cut", self._number)


def _run(orders: Connection) -> None:
    asyncio.run(_obey(orders))


async def _obey(orders: Connection) -> None:
    """Do what the campaign asks for, until it is gone."""
    ways: list[_Way] = []
    loop = asyncio.get_running_loop()
    while True:
        try:
            verb, *arguments = await loop.run_in_executor(None, orders.recv)
        except (EOFError, OSError):
            return
        if verb == "add":
            way = _Way(arguments[0])
            await way.start()
            ways.append(way)
            orders.send((len(ways) - 1, way.port))
            continue
        number, *rest = arguments
        found = getattr(ways[number], verb)
        orders.send(found(*rest) if callable(found) else found)


class _Way:
    """A proxy in the process of all of them."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.swallowed = 0
        self.delayed = 0
        self._target = target
        self._seconds = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
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
                # Lingering for no time makes the close a reset.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or somebody cut: the near end is closed too
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
        # One end has said its last: so has the other.
        writer.close()

"""A TCP proxy between one process and one server, which can cut, delay and swallow."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any

_CHUNK = 64 * 1024


class Proxies:
    """All proxies of a campaign, on one event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._made: list[Proxy] = []

    def to(self, port: int) -> "Proxy":
        """A new proxy to a port of this machine."""
        proxy = Proxy(self._loop, port)
        self._wait(proxy.start())
        self._made.append(proxy)
        return proxy

    def close(self) -> None:
        """End all."""
        for proxy in self._made:
            proxy.cut()
            self._wait(proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class Proxy:
    """One way to a server. Its methods may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self.port = 0
        self.swallowed = 0
        """Bytes that were kept back while it was silent."""
        self.delayed = 0
        """Bytes that came late."""
        self._loop = loop
        self._target = target
        self._seconds = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """As a pulled cable: connections stay, nothing passes, new ones are taken and lead nowhere."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def delay(self, seconds: float) -> None:
        """Everything comes this much later."""
        self._seconds = seconds

    def heal(self) -> None:
        """Pass everything again, what was kept back included."""
        self._seconds = 0.0
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                # Lingering for no time makes the close a reset.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
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
            self._tasks.discard(task)
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

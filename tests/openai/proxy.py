"""Proxy on a real socket that loses answers after the server has given them, as networks do."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import Engine, text

from tests.server import ApiServer

Fault = Literal["cut", "hold"]


class LosingProxy(socketserver.ThreadingTCPServer):
    """Forwards connections to a server, each for one request; the answers of the first ones are lost.

    `cut` closes the connection of the client instead of sending the answer, `hold` sends nothing until the proxy ends.
    """

    daemon_threads = True

    def __init__(self, api: ApiServer, fault: Fault, times: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port, self.fault, self._left = api.port, fault, times
        self.ended = threading.Event()
        self.answers_lost = 0
        self._lock = threading.Lock()

    def takes_answer(self) -> bool:
        """Return True if the answer that has arrived is to be lost."""
        with self._lock:
            self._left -= 1
            is_lost = self._left >= 0
            self.answers_lost += is_lost
            return is_lost


class _Connection(socketserver.BaseRequestHandler):
    server: LosingProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as upstream:
            sending = threading.Thread(target=_forward, args=(self.request, upstream), daemon=True)
            sending.start()
            answer = upstream.recv(65536)
            if answer and self.server.takes_answer():
                if self.server.fault == "hold":
                    self.server.ended.wait(60)
                return
            while answer:
                self.request.sendall(answer)
                answer = upstream.recv(65536)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def losing_answers(api: ApiServer, fault: Fault, times: int = 1) -> Iterator[tuple[LosingProxy, str]]:
    """Run the proxy; yield it and its URL."""
    with LosingProxy(api, fault, times) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy, f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.ended.set()
            proxy.shutdown()
            thread.join()


def waiting_insertions(engine: Engine) -> int:
    """Return the number of insertions that wait for a lock."""
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO%'")
    with engine.connect() as connection:
        return int(connection.scalar(waits) or 0)

"""Subscribers of C5, many per process, with raw sockets and one epoll to use little CPU.

`python -m benchmarks.c5_readers '{"port": …, "path": …, "after": …, "count": …, …}'` connects, prints `ready`, and then
reads commands from standard input: `hang SECONDS SHARE` makes that share disconnect at random moments and reconnect,
`count` reports the progress of all, `end` writes the samples and exits. Responses are lines of JSON.
"""

import heapq
import json
import os
import random
import re
import resource
import selectors
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any

_ID = re.compile(rb"\nid: (\d+)\r?\nevent: ")  # keep-alives repeat an id and are not events
_RECEIVE = 256 * 1024
_OPENING_AT_A_TIME = 50


class Subscriber:
    """One subscriber; each connection continues where the previous one ended."""

    def __init__(self, last: int, is_sampled: bool) -> None:
        self.last = last
        self.is_sampled = is_sampled
        self.socket: socket.socket | None = None
        self.is_open = False
        self._rest = b""

    def connect(self, port: int, path: str, headers: str) -> None:
        """Request the events after the last complete one."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Last-Event-ID: {self.last}\r\n\r\n"
        self.socket.sendall(request.encode())
        self.socket.setblocking(False)
        self.is_open = False
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """Return the ids of the events that this chunk completes."""
        data = self._rest + data
        if not self.is_open:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return []
            if b" 200 " not in head[:20]:
                raise RuntimeError(head.decode())
            self.is_open = True
            data = b"\n" + data
        whole = max(data.rfind(b"\n\n"), data.rfind(b"\n\r\n"))
        # The newline before an id may be the last byte of the previous chunk, so keep it in the rest.
        self._rest = data[whole + 1 :] if whole >= 0 else data
        return _ID.findall(data, 0, whole + 1) if whole >= 0 else []


class Readers:
    """All subscribers of this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._numbers = [b"%d" % seq for seq in range(options["most"] + 1)]
        self._samples = array("d")
        self._subscribers = [Subscriber(options["after"], n % options["sample"] == 0) for n in range(options["count"])]
        self._selector = selectors.EpollSelector()
        self._due: list[tuple[float, int]] = []
        self._random = random.Random(options["seed"])
        self._opening = 0
        self.received = self.wrong = self.reconnects = self.cuts = 0
        self.problem = ""

    def connect_all(self) -> None:
        """Connect all subscribers, a few at a time, and wait for the response headers."""
        for subscriber in self._subscribers:
            self._connect(subscriber)
            while self._opening >= _OPENING_AT_A_TIME:
                self.turn(1.0)
        while self._opening:
            self.turn(1.0)

    def run(self) -> None:
        """Read events and execute commands until `end`."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)
        while self.turn(max(0.0, min(1.0, self._due[0][0] - time.monotonic())) if self._due else 1.0):
            while self._due and self._due[0][0] <= time.monotonic():
                subscriber = self._subscribers[heapq.heappop(self._due)[1]]
                self.reconnects += 1
                self._close(subscriber)
                self._connect(subscriber)

    def turn(self, timeout: float) -> bool:
        """Handle available input; return False on `end`."""
        for key, _ in self._selector.select(timeout):
            subscriber = key.data
            if subscriber is None:
                if not self._obey(os.read(0, 4096).decode().split("\n")):
                    return False
                continue
            try:
                data = subscriber.socket.recv(_RECEIVE)
            except BlockingIOError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                self.cuts += 1
                self._close(subscriber)
                self._connect(subscriber)
                continue
            was_open = subscriber.is_open
            ids = subscriber.take(data)
            self._opening -= subscriber.is_open and not was_open
            if ids:
                self._check(subscriber, ids, time.monotonic())
        return True

    def report(self) -> dict[str, Any]:
        """Return the counts of this process and the id that every subscriber has reached."""
        return {
            "received": self.received,
            "wrong": self.wrong,
            "reconnects": self.reconnects,
            "cuts": self.cuts,
            "least": min(subscriber.last for subscriber in self._subscribers),
            "problem": self.problem,
        }

    def _check(self, subscriber: Subscriber, ids: list[bytes], now: float) -> None:
        """Check that every id came exactly once and in order."""
        first, last = int(ids[0]), int(ids[-1])
        if first != subscriber.last + 1 or ids != self._numbers[first : last + 1]:
            self.wrong += 1
            self.problem = self.problem or f"behind {subscriber.last} came {first} … {last}, {len(ids)} ids"
        self.received += len(ids)
        subscriber.last = last
        if subscriber.is_sampled:
            self._samples.extend((first, last, now))

    def _obey(self, lines: list[str]) -> bool:
        for verb, *words in (line.split() for line in lines if line):
            if verb == "hang":
                self._plan(float(words[0]), float(words[1]))
            say(self.report())
            if verb == "end":
                with Path(self._options["samples"]).open("wb") as file:
                    self._samples.tofile(file)
                return False
        return True

    def _plan(self, seconds: float, share: float) -> None:
        now = time.monotonic()
        chosen = self._random.sample(range(len(self._subscribers)), int(share * len(self._subscribers)))
        for n in chosen:
            heapq.heappush(self._due, (now + self._random.random() * seconds, n))

    def _connect(self, subscriber: Subscriber) -> None:
        subscriber.connect(self._options["port"], self._options["path"], self._options["headers"])
        self._opening += 1
        assert subscriber.socket is not None
        self._selector.register(subscriber.socket, selectors.EVENT_READ, subscriber)

    def _close(self, subscriber: Subscriber) -> None:
        assert subscriber.socket is not None
        self._opening -= not subscriber.is_open
        self._selector.unregister(subscriber.socket)
        subscriber.socket.close()


def say(what: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(what), flush=True)


def main() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    readers = Readers(json.loads(sys.argv[1]))
    readers.connect_all()
    say("ready")
    readers.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

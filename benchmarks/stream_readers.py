"""Subscribers of event streams for benchmarks, many per process, with raw sockets and one epoll to use little CPU.

`python -m benchmarks.stream_readers '{"ports": [8700], "paths": […], "after": …, "count": …, …}'` connects, prints
`ready`, and then reads commands from standard input: `hang SECONDS SHARE` makes that share disconnect at random moments
and reconnect, `count` reports the progress of all, `end` writes the samples and exits. Responses are lines of JSON.
Subscribers take turns in the use of `ports` and `paths`; one that is disconnected reconnects at once, to the next port.
`Readers` is one such process, `ReaderGroup` its parent's view of several.
"""

import heapq
import json
import os
import random
import re
import resource
import selectors
import socket
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

_ID = re.compile(rb"\nid: (\d+)\r?\nevent: ")  # keep-alives repeat an id and are not events
_RECEIVE = 256 * 1024
_OPENING_AT_A_TIME = 50
_RETRY_SECONDS = 0.2


class Subscriber:
    """One subscriber; each connection continues where the previous one ended."""

    def __init__(self, number: int, last: int, is_sampled: bool) -> None:
        self.number = number
        self.turn = number
        """Number of the port to connect to, which rises with each disconnection."""
        self.last = last
        self.is_sampled = is_sampled
        self.socket: socket.socket | None = None
        self.is_open = False
        self._rest = b""

    def connect(self, port: int, path: str, headers: str, version: str) -> None:
        """Request the events after the last complete one."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        request = f"GET {path} HTTP/{version}\r\nHost: 127.0.0.1\r\n{headers}Last-Event-ID: {self.last}\r\n\r\n"
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
            if b" 50" in head[:20]:
                raise ConnectionError  # of a proxy that has lost the server
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
        self._first = first = options["seed"] * options["count"]
        self._subscribers = [
            Subscriber(first + n, options["after"], n % options["sample"] == 0) for n in range(options["count"])
        ]
        self._selector = selectors.EpollSelector()
        self._due: list[tuple[float, int]] = []
        self._random = random.Random(options["seed"])
        self._opening = 0
        self._reopened: list[float] = []
        """Times at which subscribers that were disconnected had a response again."""
        self.received = self.wrong = self.reconnects = self.cuts = self.refused = 0
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
                if subscriber.socket is not None:
                    self._close(subscriber)
                self._connect(subscriber)

    def turn(self, timeout: float) -> bool:
        """Handle available input; return False on `end`."""
        for key, _ in self._selector.select(timeout):
            subscriber = key.data
            if subscriber is None:
                commands = os.read(0, 4096)
                # Without its parent, this process would try to reconnect forever.
                if not commands or not self._obey(commands.decode().split("\n")):
                    return False
                continue
            try:
                data = subscriber.socket.recv(_RECEIVE)
            except BlockingIOError:
                continue
            except ConnectionError:
                data = b""
            was_open = subscriber.is_open
            try:
                ids = subscriber.take(data) if data else None
            except ConnectionError:
                ids = None
            if ids is None:
                self._close(subscriber)
                subscriber.turn += 1
                if was_open:
                    self.cuts += 1
                    self._connect(subscriber)
                else:
                    self._retry(subscriber)
                continue
            if subscriber.is_open and not was_open:
                self._opening -= 1
                if self.cuts:
                    self._reopened.append(time.monotonic())
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
            "refused": self.refused,
            "open": sum(subscriber.is_open for subscriber in self._subscribers),
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
            self._samples.extend((subscriber.number % len(self._options["paths"]), first, last, now))

    def _obey(self, lines: list[str]) -> bool:
        for verb, *words in (line.split() for line in lines if line):
            if verb == "hang":
                self._plan(float(words[0]), float(words[1]))
            say(self.report() if verb != "end" else self._reopened)
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
        ports, paths = self._options["ports"], self._options["paths"]
        port, path = ports[subscriber.turn % len(ports)], paths[subscriber.number % len(paths)]
        try:
            subscriber.connect(port, path, self._options["headers"], self._options["version"])
        except ConnectionError:
            subscriber.turn += 1
            self._retry(subscriber)
            return
        self._opening += 1
        assert subscriber.socket is not None
        self._selector.register(subscriber.socket, selectors.EVENT_READ, subscriber)

    def _retry(self, subscriber: Subscriber) -> None:
        self.refused += 1
        heapq.heappush(self._due, (time.monotonic() + _RETRY_SECONDS, subscriber.number - self._first))

    def _close(self, subscriber: Subscriber) -> None:
        assert subscriber.socket is not None
        self._opening -= not subscriber.is_open
        self._selector.unregister(subscriber.socket)
        subscriber.socket.close()
        subscriber.socket = None
        subscriber.is_open = False


class ReaderGroup:
    """Processes of subscribers, as their parent controls them."""

    def __init__(self, folder: Path, subscribers: int, processes: int, **options: Any) -> None:
        """Start them and wait until all subscribers are connected; `options` are those of `Readers`."""
        self.reopened: list[float] = []
        self._samples = [folder / f"samples-{n}" for n in range(processes)]
        self._processes = []
        for n, samples in enumerate(self._samples):
            of_process = {
                "version": "1.1", "sample": 5, **options, "count": subscribers // processes, "seed": n,
                "samples": str(samples),
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.stream_readers", json.dumps(of_process)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in self._processes:
            assert self._heard(process) == "ready"

    def ask(self, line: str) -> list[Any]:
        """Send a command and return the response of every process."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return [self._heard(process) for process in self._processes]

    def until_all(self, last: int, deadline: float) -> list[dict[str, Any]]:
        """Wait until every subscriber has this event, or for the deadline; return the reports."""
        while True:
            reports = self.ask("count")
            if all(report["least"] == last for report in reports) or time.monotonic() > deadline:
                return reports
            time.sleep(0.05)

    def end(self) -> list[tuple[int, int, int, float]]:
        """Return samples of (path, first, last, time) of events that arrived together; sets `reopened`."""
        self.reopened = sorted(moment for one in self.ask("end") for moment in one)
        records = []
        for process, path in zip(self._processes, self._samples, strict=True):
            process.wait(timeout=30)
            values = array("d")
            values.frombytes(path.read_bytes())
            columns = (values[n::4] for n in range(4))
            records += [(int(a), int(b), int(c), t) for a, b, c, t in zip(*columns, strict=True)]
        return records

    @staticmethod
    def _heard(process: "subprocess.Popen[str]") -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the readers ended with {process.wait()}")
        return json.loads(line)


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

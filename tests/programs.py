"""Programs of the service as processes of their own, forked in tests from a process that has imported them.

An import of the API or the worker takes one to two seconds of processor time, a fork a few milliseconds. A forked
program has its own environment, output, signals and exit; tests kill, freeze and await it like any other process. Two
differences remain: its parent is a copy of the template, and `/proc/PID/cmdline` and `environ` show the template's.
Starts from nothing are tested elsewhere: `anneal up`, `anneal worker` and the chaos suite run real processes.

Outside pytest (benchmarks, fuzzing) nothing is forked: `start` starts `python -m …`.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests import fork_server

_PRELOADED = (
    "worker.main", "worker.attempts.supervisor", "app.main", "app.server", "app.cli.main",
    "app.cli.runs.commands", "app.cli.datasets", "app.cli.workers", "app.standalone.supervisor",
    "app.tables.migrate", "alembic.command", "tests.api_program", "uvicorn.__main__", "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto", "uvicorn.lifespan.on", "celery.app.amqp", "celery.app.builtins", "celery.app.trace",
    "celery.backends.redis", "celery.concurrency.thread", "celery.events.state", "celery.fixups.django",
    "celery.loaders.app", "celery.worker.autoscale", "celery.worker.components", "celery.worker.consumer",
    "celery.worker.strategy", "kombu.transport.redis", "psycopg_binary", "sqlalchemy.dialects.postgresql.psycopg",
)  # fmt: skip
_PROGRAMS = ("worker.main", "app.cli.main", "tests.api_program", "uvicorn.__main__")
"""Modules that a copy executes anew, as `python -m` does."""
_START_SECONDS = 60.0


class Process(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """Return the exit code, or None."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def terminate(self) -> None:
        """Send SIGTERM."""


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    errors: Path | None = None,
) -> Process:
    """Start `python -m module arguments`; append its output to `log`, and standard error to `errors` where given."""
    errors = errors or log
    for path in filter(None, (log, errors)):
        path.touch()  # the forked process opens it some time later; a test may read it at once
    if _template is not None:
        return _template.start(module, arguments, environment, log, errors)
    with contextlib.ExitStack() as stack:
        out, err = (None if path is None else stack.enter_context(path.open("ab")) for path in (log, errors))
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, env=dict(environment), stdout=out, stderr=err)


def anneal(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `anneal` to its end in a process of its own, which need not import anything."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        code = start("app.cli.main", arguments, environment, out, err).wait(120)
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def shell_command(module: str) -> str:
    """Return what `python -m module` is in a shell: forked like other programs, with the shell's streams."""
    program = [sys.executable, "-m", module]
    if _template is not None:
        script = Path(__file__).with_name("forked_command.py")
        program = [sys.executable, "-I", "-S", str(script), _template.path, module]
    return shlex.join(program)


class ForkedProcess:
    """A process that the template has forked and waits for."""

    def __init__(self, pid: int, template: "Template") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """Return the exit code, or None."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


class Template:
    """Client of the template process, which is started with the first program of a test session."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._is_closed = False

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
        errors: Path | None,
    ) -> ForkedProcess:
        """Fork a copy that becomes `python -m module arguments`."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "streams": [None, *(None if path is None else str(path) for path in (log, errors))],
        }
        with self._starting:
            self._connect().sendall(json.dumps(request).encode() + b"\n")
            with self._changed:
                self._changed.wait_for(lambda: self._started or self._is_closed, _START_SECONDS)
                assert self._started, "the template process forks"
                return ForkedProcess(self._started.pop(), self)

    @property
    def path(self) -> str:
        """Path of the socket of the template, which is started if it does not run."""
        with self._starting:
            self._connect()
        return str(self._path)

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket, self._server = fork_server.connect(self._path, [sys.executable, "-m", "tests.programs"])
            threading.Thread(target=self._receive, args=[self._socket], name="template", daemon=True).start()
        return self._socket

    def exit_code(self, pid: int, timeout: float | None) -> int | None:
        """Return how a copy ended, as soon as it has."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._is_closed, timeout)
            assert pid in self._codes or not self._is_closed, "the template process is there"
            return self._codes.get(pid)

    def close(self) -> None:
        """End the copy of the template, and the template if this started it; programs go on."""
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_WR)
            with self._changed:
                assert self._changed.wait_for(lambda: self._is_closed, 30), "the copy of the template ends"
            self._socket.close()
        if self._server is not None:
            fork_server.end(self._server)

    def _receive(self, connection: socket.socket) -> None:
        with connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "code" in message:
                        self._codes[message["pid"]] = message["code"]
                    else:
                        self._codes.pop(message["pid"], None)  # of an earlier process with the same number
                        self._started.append(message["pid"])
                    self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


_template: Template | None = None


@contextlib.contextmanager
def forked(path: Path) -> Any:
    """Fork the programs that are started within, from a template whose socket is at `path`."""
    global _template
    _template = Template(path)
    try:
        yield
    finally:
        _template.close()
        _template = None


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a copy for each request until the client is gone; return the request in a copy."""
    with selectors.DefaultSelector() as selector, requests:
        selector.register(requests, selectors.EVENT_READ)
        pids: dict[int, int] = {}
        received = b""
        while True:
            for key, _ in selector.select():
                if key.fd in pids:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid = pids.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _send(requests, {"pid": pid, "code": code})
                    continue
                data = requests.recv(1 << 20)
                if not data:
                    return None
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if pid == 0:
                        for descriptor in pids:
                            os.close(descriptor)
                        request: dict[str, Any] = json.loads(line)
                        return request
                    descriptor = os.pidfd_open(pid)
                    pids[descriptor] = pid
                    selector.register(descriptor, selectors.EVENT_READ)
                    _send(requests, {"pid": pid})


def _send(requests: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has gone meanwhile
        requests.sendall(json.dumps(message).encode() + b"\n")


def _preload() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PROGRAMS:
        del sys.modules[name]
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"a fork would lack these threads: {threads}"


def _become(request: dict[str, Any]) -> None:
    """Run the program of a request in this process, with its environment and output."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, path in enumerate(request["streams"]):
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
            stream = os.open(path, flags | os.O_CLOEXEC, 0o644)
            os.dup2(stream, number)
            os.close(stream)
    # Those of the template keep what they know of its files: that one can seek in them.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which close the connection
    gc.disable()
    _preload()
    gc.collect()
    gc.freeze()
    gc.enable()
    request = _serve(fork_server.serve(sys.argv[1]))
    if request is not None:
        _become(request)


if __name__ == "__main__":
    _main()

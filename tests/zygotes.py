"""Zygotes of workers, forked in tests from a process that has imported the training code.

The imports take five seconds of processor time and more. A worker that runs as `python -m tests.zygotes` forks its
zygote instead of starting it. Two differences remain: the parent of the zygote is the server, and the zygote ends by
the end of its worker's socket only. `anneal up`, chaos and the tests of the launcher start real zygotes.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import fork_server

_PATH = "TEST_ZYGOTES"
"""Variable with the path of the server's socket."""
_PACE = "TEST_PACE"
"""Variable with the path of a file of `Pace`."""
_PACED_SECONDS = 0.3


class Pace:
    """Slows down the trainers of a worker from a step on, so that a test has time for what it does meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def slow_from(self, step: int) -> Iterator[None]:
        """Within, let each step from this one on take 0.3 s longer."""
        self._path.write_text(str(step))
        try:
            yield
        finally:
            self._path.unlink()

    def variables(self) -> dict[str, str]:
        """Return what a worker's environment needs."""
        return {_PACE: str(self._path)}


class Server:
    """The process from which zygotes are forked; started with the first worker that wants one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what a worker's environment needs; start the server with the environment of trainers."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.zygotes"]
            connection, self._process = fork_server.connect(self._path, command, environment)
            connection.close()
        return {_PATH: str(self._path)}

    def close(self) -> None:
        """End the server, and with it every zygote."""
        if self._process is not None:
            fork_server.end(self._process)


@contextlib.contextmanager
def server(path: Path) -> Iterator[Server]:
    """Offer a server whose socket is at `path`."""
    offered = Server(path)
    try:
        yield offered
    finally:
        offered.close()


class ForkedZygote:
    """The part of `subprocess.Popen` that the launcher uses."""

    def __init__(self, modules: Sequence[str], end: int, environment: Mapping[str, str], folder: Path) -> None:
        paced = {name: os.environ[name] for name in [_PACE] if name in os.environ}
        request = {"modules": list(modules), "environment": {**environment, **paced}, "folder": str(folder)}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[_PATH])
            socket.send_fds(connection, [json.dumps(request).encode()], [end, 1, 2])
            self.pid = int(connection.recv(16))
            self._process = os.pidfd_open(self.pid)
            connection.send(b"\n")

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the end."""
        waiting = select.poll()
        waiting.register(self._process, select.POLLIN)
        waiting.poll()
        os.close(self._process)


def _popen(command: Sequence[str], **options: Any) -> Any:
    if "worker.process.zygote" not in command:
        return subprocess.Popen(command, **options)
    modules = command[command.index("--parent") + 2 :]
    (end,) = options["pass_fds"]
    return ForkedZygote(modules, end, options["env"], options["cwd"])


def _work() -> None:
    """Run the worker's program."""
    from worker import main
    from worker.process import launcher

    launcher.subprocess = SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    sys.exit(main.main())


def _warm_libraries() -> None:
    """Compute what trainers would each compute, with one thread: a fork would lose others."""
    import torch

    from tests.worker.training.warm import warm_libraries

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warm_libraries()
    torch.set_num_threads(threads)


def _let_steps_be_paced() -> None:
    """Let trainers wait at each step that they have recorded, while the file of a `Pace` is there."""
    from worker.wire.journal import Journal

    record_step = Journal.record_step
    pace = Path(os.environ[_PACE])

    def record_and_wait(journal: Journal, step: int, *values: Any) -> None:
        record_step(journal, step, *values)
        with contextlib.suppress(FileNotFoundError):
            if step >= int(pace.read_text()):
                threading.Event().wait(_PACED_SECONDS)

    Journal.record_step = record_and_wait  # type: ignore[method-assign]


def _serve(path: str) -> None:
    """Fork a zygote for each connection."""
    from worker.process import zygote

    zygote.preload_modules(["worker.training.__main__", "worker.fake.trainer"])
    _warm_libraries()
    gc.collect()
    gc.freeze()
    connection = fork_server.serve(path)
    packet, received, *_ = socket.recv_fds(connection, 1 << 16, 3)
    if not packet:  # of the process that has started the server
        return
    request = json.loads(packet)
    end, *outputs = received
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    if _PACE in os.environ:
        _let_steps_be_paced()
    os.chdir(request["folder"])
    connection.send(str(os.getpid()).encode())
    connection.recv(1)
    connection.close()
    zygote.main(["--fd", str(end), "--parent", str(os.getppid()), *request["modules"]])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve(sys.argv[1])
    else:
        _work()

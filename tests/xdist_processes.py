"""Processes of pytest-xdist, forked from one that has imported what the tests import.

Each process collects all tests, and most of that are imports: six seconds of processor time. The template imports no
module of `tests`, whose assertions pytest rewrites.

For each process, pytest-xdist starts `python xdist_processes.py SOCKET -u -c CODE`. That lets a copy of the template
execute the code with its streams and its environment, and ends with the copy.
"""

import contextlib
import gc
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PRELOADED = (
    "worker.training.__main__", "worker.training.methods.rlhf", "worker.training.output.export", "worker.main",
    "worker.attempts.supervisor", "app.main", "app.server", "app.cli.main", "app.standalone.supervisor",
    "app.tables.migrate", "app.api.uvicorn_protocol", "uvicorn", "httpx", "pandas", "pyarrow.parquet",
    "playwright.sync_api", "torch._inductor.compile_fx", "transformers", "trl", "peft", "bitsandbytes",
)  # fmt: skip


@contextlib.contextmanager
def template(specs: Sequence[Any], modules: Sequence[str] = _PRELOADED) -> Iterator[None]:
    """Let the processes of these specifications of execnet be copies of a template, which ends with the context."""
    from tests import fork_server

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "template"
        command = [sys.executable, "-m", "tests.xdist_processes", *modules]
        # One thread, as in `conftest.py`. The threads of numpy's library would start with its import.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "OPENBLAS_NUM_THREADS": "1"}
        connection, server = fork_server.connect(path, command, environment)
        connection.close()
        assert server is not None
        for spec in specs:
            spec.python = shlex.join([sys.executable, "-I", "-S", __file__, str(path)])
        try:
            yield
        finally:
            fork_server.end(server)


def _serve(modules: Sequence[str], path: str) -> None:
    """Import the modules; in a copy for each connection, execute the code that it sends."""
    from tests import fork_server
    from worker.process import zygote

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    zygote.preload_modules(modules)
    gc.collect()
    gc.freeze()
    connection = fork_server.serve(path)
    received, streams, *_ = socket.recv_fds(connection, 1, 3)
    if not received:  # of the process that has started the template
        return
    with connection.makefile("r") as file:
        request = json.load(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["-c"]
    exec(request["code"], {"__name__": "__main__"})


def _request(path: str, code: str) -> None:
    """Let a copy of the template execute the code; return when it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        request = {"environment": dict(os.environ), "folder": str(Path.cwd()), "code": code}
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if "-c" in sys.argv:
        _request(sys.argv[1], sys.argv[-1])
    else:
        _serve(sys.argv[1:-1], sys.argv[-1])

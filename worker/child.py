"""The first moments of a training process, the same for one forked from the zygote and one started cold.

After these it is the leader of its own session, dies with its parent and with its lease, sees only its own
device and descriptors, and everything that it or a library prints reaches the supervisor.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import math
import os
import pwd
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from worker.training.control import Control

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_IONBF = 2
_LOCK_SECONDS = 0.1
_TELL_SECONDS = 60.0
_LARGEST_WRITE = 64 * 1024
_LARGEST_SECRETS = 64 * 1024
ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""What a service manager sends to every process of a service. Whoever starts a training process blocks them, so that
not even the first moments of one are ended by them: they wait until it can take them for a request to stop."""
_OOM_SCORE_ADJ = "500"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Start:
    """What a new training process has to know; travels as JSON beside its descriptors."""

    entry: str
    """`module:function`; the function takes arguments and returns an exit code."""
    arguments: list[str]
    folder: str
    """Becomes the working directory."""
    device: dict[str, Any]
    """`{"kind": "cpu" | "cuda", "index": n, "id": "GPU-…"}`"""
    lock_paths: list[str] = field(default_factory=list)
    deadline: float | None = None
    """CLOCK_MONOTONIC seconds at which the kernel ends the process unless a renewal comes."""
    user: str | None = None
    has_secrets: bool = False
    """Whether secrets come first on the control socket: this here is on a command line, or passes through the zygote,
    whose memory every later training process gets a copy of."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Start":
        return cls(**json.loads(text))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end now if that happened."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def run(start: Start, fds: Sequence[int], parent: int) -> None:
    """Become the training process that `start` describes and end with its exit code; never returns.

    `fds` are report, stdout, stderr and control; `parent` is the process that must still be there.
    """
    code = 1
    try:
        _prepare(start, fds, parent)
        report, _stdout, _stderr, control = fds
        if start.has_secrets:
            os.environ.update(_receive_secrets(control))
        # The first renewals, and requests to stop, have to arrive during imports that may take longer than the lease.
        _heed_endings(Control.start(control, start.deadline))
        _take_locks(start.lock_paths)
        if start.user is not None:
            _become(start.user)
            die_with_parent(parent)  # which the kernel forgets when a process changes its user
        arguments = [*start.arguments, "--report-fd", str(report), "--control-fd", str(control)]
        sys.argv = [start.entry, *arguments]
        code = _load(start.entry)(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            os.write(2, end.code.encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        _finish(code)


def _receive_secrets(control: int) -> dict[str, str]:
    """The first message on the control socket, which lies there before this process begins."""
    packet = os.read(control, _LARGEST_SECRETS)
    if not packet:
        os._exit(1)  # the supervisor is gone
    secrets: dict[str, str] = json.loads(packet)["secrets"]
    return secrets


def _prepare(start: Start, fds: Sequence[int], parent: int) -> None:
    """Everything before the first deadline is in force: nothing here writes, and who is late finds it has passed."""
    report, stdout, stderr, control = fds
    os.setsid()
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    _close_all_but({0, 1, 2, report, control})
    _reset_signals()
    _route_output()
    with open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write(_OOM_SCORE_ADJ)  # under memory pressure the kernel takes a trainer, never a database
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump of a model would fill the disk
    os.environ["CUDA_VISIBLE_DEVICES"] = start.device["id"] if start.device["kind"] == "cuda" else ""
    os.chdir(start.folder)


def _become(user: str) -> None:
    account = pwd.getpwnam(user)
    if os.geteuid() == account.pw_uid:
        return
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    # A process of that user like any other: without this it could not read its own /proc/self.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.environ.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:  # the one that listed the folder
                pass


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ENDINGS)
    for number in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _heed_endings(control: Control) -> None:
    """From here on a signal to end is a request to stop; one that has come already is delivered now."""
    control.stop_on_sigterm()
    for number in ENDINGS - {signal.SIGTERM}:
        signal.signal(number, lambda _number, _frame: control.request_stop(save=True, why="drain"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


class _Output(io.RawIOBase):
    """A standard stream whose writes fit into one datagram each."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _LARGEST_WRITE):
            os.write(self._descriptor, view[begin : begin + _LARGEST_WRITE])
        return len(view)


def _route_output() -> None:
    """No buffer in Python nor in C, so that nothing is overtaken and nothing dies unsaid."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = _Output(descriptor, f"<{name}>")
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IONBF, ctypes.c_size_t(0))
    faulthandler.enable(file=2, all_threads=True)


def _take_locks(paths: Sequence[str]) -> None:
    """Hold these locks for life: while they are held, no other trainer takes the run or the device."""
    for path in sorted(paths):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        told = -math.inf
        while not _is_taken(lock):
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()  # again and again: who waits in line for hours must not look as if it hung
                sys.stderr.write(f"waiting for another training process that holds {os.path.basename(path)}\n")  # noqa: PTH119
            time.sleep(_LOCK_SECONDS)


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load(entry: str) -> Callable[[list[str]], int]:
    module, _, function = entry.partition(":")
    with collector_off():
        main: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return main


@contextmanager
def collector_off() -> Iterator[None]:
    """Import without the garbage collector.

    Imports of the training libraries create a million objects and hardly any garbage; looking for it again and again
    takes a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _finish(code: int) -> None:
    """Run exit handlers and flush, then leave without the interpreter's teardown, where libraries crash."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        _libc.fflush(None)
    finally:
        os._exit(code & 0xFF)


def main(arguments: Sequence[str]) -> None:
    """Cold start: `python -m worker.child <start as JSON> <report> <stdout> <stderr> <control> <parent>`."""
    start, *numbers = arguments
    *fds, parent = (int(number) for number in numbers)
    for descriptor in fds:
        os.set_inheritable(descriptor, False)
    run(Start.from_json(start), fds, parent)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Startup of a training process, the same for one forked from the zygote and one started cold.

The process then leads its own session, dies with its parent and with its lease, sees only the devices of its run and
its own descriptors, and everything that it or a library prints reaches the supervisor.
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
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from worker.process import orphans
from worker.wire.control import Control

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_IONBF = 2
_LOCK_SECONDS = 0.1
_LOG_SECONDS = 60.0
_LARGEST_WRITE = 64 * 1024
_LARGEST_SECRETS = 64 * 1024
TERMINATION_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that a service manager sends to every process of a service. The launcher blocks them before it starts a
training process, so that they stay pending during its startup and are then handled as requests to stop."""
_OOM_SCORE_ADJ = "500"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class LaunchSpec:
    """Launch parameters of a training process; sent as JSON alongside its descriptors."""

    entry: str
    """`module:function`; the function takes arguments and returns an exit code."""
    arguments: list[str]
    folder: str
    """Working directory of the process."""
    devices: list[AssignedDevice]
    """Devices of the run on this host. Each of its processes sees all of them: a GPU that is hidden cannot exchange
    data with another one directly."""
    lock_paths: list[str] = field(default_factory=list)
    deadline: float | None = None
    """Seconds since boot at which the kernel ends the process unless a renewal arrives."""
    user: str | None = None
    has_secrets: bool = False
    """True if the first message on the control socket contains secrets. They are not part of this object, because it
    appears on a command line or passes through the zygote, whose memory every later training process inherits."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "LaunchSpec":
        fields = json.loads(text)
        return cls(**{**fields, "devices": [AssignedDevice(**device) for device in fields["devices"]]})


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit now if it has already ended."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def forget_exit_handlers() -> None:
    """Forget the exit handlers and finalizers of the process that this one was forked from; its own run at its end.

    They clean up what that process made, such as temporary folders of W&B that its other children use. Those of
    `multiprocessing` are kept: they end what this process starts.
    """
    atexit._clear()
    for name in ("multiprocessing.util", "multiprocess.util"):  # the second is a fork that `datasets` uses
        if name in sys.modules:
            atexit.register(sys.modules[name]._exit_function)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers again


def run(start: LaunchSpec, fds: Sequence[int], parent: int, inherited: Set[int] = frozenset()) -> None:
    """Become the training process that `start` describes and exit with its exit code; never returns.

    `fds` are report, stdout, stderr and control; `parent` is the id of the process that must still be the parent.
    `inherited` stay open: what the libraries of that process have opened. The driver of a GPU goes on using the numbers
    of its own in a fork, so they must not become those of other files.
    """
    code = 1
    try:
        _prepare_process(start, fds, parent, inherited)
        report, _stdout, _stderr, control = fds
        if start.has_secrets:
            os.environ.update(_receive_secrets(control))
        # Renewals and stop requests must arrive during imports, which may take longer than the lease.
        _handle_termination_signals(Control.start(control, start.deadline))
        _take_locks(start.lock_paths)
        if start.user is not None:
            _become_user(start.user)
            die_with_parent(parent)  # the kernel clears this setting when a process changes its user
        arguments = [*start.arguments, "--report-fd", str(report), "--control-fd", str(control)]
        sys.argv = [start.entry, *arguments]
        code = _load_entry(start.entry)(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            os.write(2, end.code.encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        _exit_process(code)


def _receive_secrets(control: int) -> dict[str, str]:
    """Read the secrets: the first message on the control socket, queued before this process starts."""
    packet = os.read(control, _LARGEST_SECRETS)
    if not packet:
        os._exit(1)  # the supervisor is gone
    return ControlMessage.from_json(packet).secrets or {}


def _prepare_process(start: LaunchSpec, fds: Sequence[int], parent: int, inherited: Set[int]) -> None:
    """Set up the process before its first deadline takes effect.

    Nothing here writes data, and a process that is delayed here finds its deadline already passed.
    """
    report, stdout, stderr, control = fds
    os.setsid()
    die_with_parent(parent)
    orphans.become_subreaper()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    _close_all_but({0, 1, 2, report, control} | inherited)
    _reset_signals()
    _route_output()
    with open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write(_OOM_SCORE_ADJ)  # under memory pressure the kernel kills a trainer, never a database
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of a model would fill the disk
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.id for device in start.devices if device.kind == "cuda")
    os.chdir(start.folder)


def _become_user(user: str) -> None:
    account = pwd.getpwnam(user)
    if os.geteuid() == account.pw_uid:
        return
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    # Make the process dumpable, as any other process of that user is: otherwise it could not read its own /proc/self.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.environ.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name)


def open_descriptors() -> set[int]:
    """Return the numbers of the open descriptors of this process."""
    with os.scandir("/proc/self/fd") as entries:
        listed = {int(entry.name) for entry in entries}
    return {descriptor for descriptor in listed if _is_open(descriptor)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # the one that listed the directory
        return False
    return True


def _close_all_but(remaining: Set[int]) -> None:
    for descriptor in open_descriptors() - remaining:
        os.close(descriptor)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, TERMINATION_SIGNALS)
    for number in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _handle_termination_signals(control: Control) -> None:
    """Treat termination signals as stop requests from now on; those already pending are delivered now."""
    control.stop_on_sigterm()
    for number in TERMINATION_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, lambda _number, _frame: control.request_stop(StopRequest("checkpoint", "drain")))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)


class _Output(io.RawIOBase):
    """Standard stream whose writes each fit into one datagram."""

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
    """Disable buffering in Python and in C, so that output keeps its order and none is lost in a crash."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = _Output(descriptor, f"<{name}>")
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IONBF, ctypes.c_size_t(0))
    faulthandler.enable(file=2, all_threads=True)


def _take_locks(paths: Sequence[str]) -> None:
    """Hold these locks for the life of the process, so that no other trainer uses the run or the device."""
    for path in sorted(paths):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Who can open the file, even for reading, can hold its lock. Earlier versions let everybody read it.
        with suppress(PermissionError):
            os.fchmod(lock, 0o600)
        logged_at = -math.inf
        while not _is_taken(lock):
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()  # repeated, so that a process that waits for hours does not look hung
                sys.stderr.write(f"waiting for another training process that holds {os.path.basename(path)}\n")  # noqa: PTH119
            time.sleep(_LOCK_SECONDS)


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load_entry(entry: str) -> Callable[[list[str]], int]:
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


def _exit_process(code: int) -> None:
    """Run exit handlers and flush, then exit without the interpreter's teardown, in which libraries crash."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        _libc.fflush(None)
    finally:
        os._exit(code & 0xFF)


def main(arguments: Sequence[str]) -> None:
    """Start cold: `python -m worker.process.child <start as JSON> <report> <stdout> <stderr> <control> <parent>`."""
    start, *numbers = arguments
    *fds, parent = (int(number) for number in numbers)
    for descriptor in fds:
        os.set_inheritable(descriptor, False)
    run(LaunchSpec.from_json(start), fds, parent)


if __name__ == "__main__":
    main(sys.argv[1:])

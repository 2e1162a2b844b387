"""Promises about handles of processes, with pidfds and on a system that refuses them."""

import errno
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.infra.process.handle import PidfdHandle, PolledHandle, ProcessHandle
from app.infra.process.identity import ProcessIdentity, process_stat, start_time
from tests.nodes import ROOT
from tests.waiting import eventually
from worker.process.child import open_descriptors
from worker.process.process_group import kill_session

Open = Callable[[int], ProcessHandle]


@pytest.fixture(params=["pidfd", "polled"])
def open_handle(request: pytest.FixtureRequest) -> Open:
    if request.param == "pidfd":
        return lambda pid: PidfdHandle(os.pidfd_open(pid))
    return lambda pid: PolledHandle(pid, start_time(pid))


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_end_of_a_process_makes_its_handle_readable_and_is_reaped_once(
    open_handle: Open, child: "subprocess.Popen[bytes]"
) -> None:
    with open_handle(child.pid) as handle:
        assert not select.select([handle], [], [], 0.1)[0] and not handle.wait(0.1) and handle.reap() is None
        assert handle.send_signal(signal.SIGTERM)
        assert select.select([handle], [], [], 30)[0] and handle.wait(30)
        exited = handle.reap()
        assert (exited.si_pid, exited.si_code, exited.si_status) == (child.pid, os.CLD_KILLED, signal.SIGTERM)
        child.returncode = -signal.SIGTERM
        assert not handle.send_signal(signal.SIGTERM) and handle.wait()
        with pytest.raises(ChildProcessError):
            handle.reap()


@pytest.fixture
def process_without_first_thread() -> Iterator["subprocess.Popen[bytes]"]:
    """A session leader that the system calls a zombie, although a thread of it runs."""
    program = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).syscall(EXIT, 0)"
    number = {"x86_64": "60", "aarch64": "93"}[platform.machine()]
    arguments = [sys.executable, "-c", program.replace("EXIT", number)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True) as process:
        eventually(lambda: _state_of(process.pid) == "Z")
        yield process
        process.kill()


def _state_of(pid: int) -> str:
    stat = process_stat(pid)
    return stat.state if stat is not None else ""


def test_process_has_not_ended_while_a_thread_of_it_runs(
    open_handle: Open, process_without_first_thread: "subprocess.Popen[bytes]"
) -> None:
    pid = process_without_first_thread.pid
    identity = ProcessIdentity.of_process(pid, start_time(pid))
    with open_handle(pid) as handle:
        assert not select.select([handle], [], [], 0.1)[0] and not handle.wait() and handle.reap() is None
        assert identity.exists
        assert kill_session(identity, handle) == [pid]
        assert not identity.exists and handle.wait()
        assert handle.reap().si_status == signal.SIGKILL
        process_without_first_thread.returncode = -signal.SIGKILL


@pytest.mark.needs("root")
def test_process_of_another_user_is_not_signaled_without_permission(open_handle: Open) -> None:
    program = "import os; os.setuid(65534); print(flush=True); import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65533)
                open_handle(other.pid).send_signal(signal.SIGTERM)
            except PermissionError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        other.kill()


def test_later_process_with_the_same_id_is_not_signaled(child: "subprocess.Popen[bytes]") -> None:
    with PolledHandle(child.pid, start_time(child.pid) - 1) as handle:
        assert not handle.send_signal(signal.SIGKILL) and handle.wait()
    assert child.poll() is None


def test_closed_handle_leaves_no_descriptor_and_no_thread(open_handle: Open, child: "subprocess.Popen[bytes]") -> None:
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    for _ in range(3):
        with open_handle(child.pid) as handle:
            handle.fileno()
        assert open_descriptors() <= descriptors and set(threading.enumerate()) <= threads


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_system_that_refuses_pidfds_stops_a_service_and_signals_a_worker_all_the_same(
    number: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.seccomp", str(number), sys.executable, "-c", _STOP, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["PolledHandle", "False", "True", "0", "True", str(-signal.SIGUSR1), "False"]


_STOP = """
import os, subprocess, sys, time
from pathlib import Path
from app.infra import home_lock
from app.infra.process.handle import open_process
from app.infra.process.identity import ProcessIdentity, start_time
from app.workers.status_files import DRAIN_SIGNAL, WorkerStatus

print(type(open_process(os.getpid())).__name__)
home = Path(sys.argv[1])
service = '''
import signal, sys, time
from pathlib import Path
from app.infra.home_lock import HomeLock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with HomeLock(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(600)
'''
running = subprocess.Popen([sys.executable, "-c", service, str(home)], stdout=subprocess.PIPE)
running.stdout.readline()
with home_lock._open_holder(home) as holder:
    print(holder.wait(0.1))
with home_lock.stop_holder(home) as holder:
    print(holder.wait(60))
print(running.wait(60))
worker = subprocess.Popen(["sleep", "600"])
status = WorkerStatus("wrk", ProcessIdentity.of_process(worker.pid, start_time(worker.pid)))
print(status.send_signal(DRAIN_SIGNAL))
print(worker.wait(60))
print(status.send_signal(DRAIN_SIGNAL))
"""

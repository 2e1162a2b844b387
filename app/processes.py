"""Starting child processes that cannot outlive us, and the few questions to the machine that go with it."""

import ctypes
import os
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
# Below the range from which the kernel takes ports of outgoing connections: a server that is restarted must
# find its port free, and an unlucky client must not sit on it.
_PORTS = range(20000, 32000)


def start_child(
    arguments: Sequence[str],
    *,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    descriptors: Sequence[int] = (),
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a process in its own group (a Ctrl-C reaches only us) that gets `death_signal` when we die.

    Call it from the main thread: the kernel sends the signal when the *thread* that started the child ends.
    Both output streams are appended to `log`; without one they are the caller's. `descriptors` stay open in it.
    """
    parent = os.getpid()

    def before_exec() -> None:
        # Runs between fork and exec: only calls that were loaded before, no allocation worth the name.
        _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=None if environment is None else dict(environment),
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    finally:
        if output is not None:
            os.close(output)


def stop_child(child: subprocess.Popen[bytes], grace: float, stop_signal: signal.Signals = signal.SIGTERM) -> bool:
    """End `child` with `stop_signal`, after `grace` seconds with SIGKILL; False when it took the SIGKILL."""
    if child.poll() is not None:
        return True
    child.send_signal(stop_signal)
    try:
        child.wait(grace)
        return True
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False


def end_leftovers(folder: Path, program: str) -> int:
    """End every `program` that still runs in `folder`, left by a start that was killed; answers how many.

    Only for a caller who holds the lock on the folder. Process ids in files lie (they are reused), the working
    folder of a live process does not.
    """
    leftovers = [process for process in psutil.process_iter() if _runs_in(process, folder, program)]
    for process in leftovers:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(leftovers, timeout=10)
    return len(leftovers)


def _runs_in(process: psutil.Process, folder: Path, program: str) -> bool:
    try:
        return process.name().startswith(program) and Path(process.cwd()) == folder
    except (psutil.Error, OSError):
        return False


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server may listen on this port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a predecessor that are still closing are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """A loopback port that is free now: the preferred one if it is."""
    if preferred is not None and port_is_free(preferred):
        return preferred
    # Of the system: where two processes have seeded Python's the same way, they would pick the same ports.
    for port in random.SystemRandom().sample(_PORTS, 200):
        if port_is_free(port):
            return port
    raise OSError("no free port on the loopback interface")


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])

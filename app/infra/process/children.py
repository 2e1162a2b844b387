"""Child processes that cannot outlive their parent, and log tails."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(
    arguments: Sequence[str],
    *,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    descriptors: Sequence[int] = (),
    death_signal: signal.Signals | None = signal.SIGKILL,
    pipe: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session (Ctrl-C does not reach it) that gets `death_signal` when this process dies.

    With None it outlives this process.
    Call it from the main thread: the kernel sends the signal when the *thread* that started the child ends.
    Both output streams are appended to `log`, or inherited without one; with `pipe` the caller reads them from
    `stdout`. The child inherits `descriptors`.
    """
    parent = os.getpid()

    def before_exec() -> None:
        # Runs between fork and exec: use only functions that are already loaded, and allocate almost nothing.
        _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal or 0), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else output,
            stderr=subprocess.STDOUT if pipe else output,
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
    """Stop `child` with `stop_signal`, and with SIGKILL after `grace` seconds; return False if SIGKILL was needed."""
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


def kill_leftovers(folder: Path, program: str) -> int:
    """Kill every `program` that still runs in `folder` after a killed start; return their number.

    The caller must hold the lock on the folder. Process ids in files are unreliable because they are reused; the
    working directory of a live process is reliable.
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


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last lines of a log file, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])

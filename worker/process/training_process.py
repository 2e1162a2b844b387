"""Training process as its supervisor holds it: its output, its control messages and its exit."""

import json
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from anneal.contracts.attempt.failure_report import KillReason
from anneal.contracts.attempt.messages import ControlMessage
from app.infra.process.handle import ProcessHandle
from app.infra.process.identity import ProcessIdentity
from worker.process import process_group
from worker.process.channel import Channel
from worker.process.orphans import Orphans

_END_SECONDS = 5.0


@dataclass(frozen=True)
class Exit:
    """Exit of a training process: by exit code, by signal, or not observed."""

    code: int | None = None
    signal: int | None = None
    launcher_lost: bool = False
    """The zygote died, and its children with it, so the exit was not observed."""
    out_of_memory: bool = False
    """The process ended by a SIGKILL that this worker did not send, while the kernel killed processes for lack of
    memory."""
    rank: int = 0
    """Process of the group whose end this is."""
    peer_lost: bool = False
    """Processes of the group lost the connection to each other, and none of them ended first."""
    part_problem: str | None = None
    """Reason for which a part of the run on another host ended, if it is not the end of a process."""
    behind: tuple[str, ...] = ()
    """Ranks for which all others waited when this worker killed the group because it was silent."""
    suspended: tuple[int, ...] = ()
    """Ranks whose process was suspended when this worker killed the group because it was silent."""
    killed_for: KillReason | None = None
    """Reason for which this worker killed the group."""


class ExitWatcher(Protocol):
    """Source of a process's exit status."""

    launched: Literal["zygote", "cold"]

    def fileno(self) -> int:
        """Return a descriptor that is readable when the exit may be known."""

    def poll_exit(self) -> Exit | None:
        """Return the exit if it is known; never waits."""

    def close(self) -> None: ...


class ZygoteExitWatcher:
    """Exit status of a process that the zygote forked and reaps, which it reports on a status socket."""

    launched: Literal["zygote", "cold"] = "zygote"

    def __init__(self, status: socket.socket, process: ProcessHandle) -> None:
        self._status = status
        self._process = process
        self._lost = False
        status.setblocking(False)

    def fileno(self) -> int:
        return self._process.fileno() if self._lost else self._status.fileno()

    def poll_exit(self) -> Exit | None:
        if not self._lost:
            try:
                packet = self._status.recv(1024)
            except BlockingIOError:
                return None
            except ConnectionError:
                packet = b""
            if packet:
                end = json.loads(packet)
                return Exit(code=end.get("code"), signal=end.get("signal"))
            # The zygote is gone and its children die with it; another attempt may start only after they are dead.
            self._lost = True
            self._process.send_signal(signal.SIGKILL)
        return Exit(launcher_lost=True) if self._process.wait() else None

    def close(self) -> None:
        self._status.close()


class ColdExitWatcher:
    """Exit status of a process that this one started itself."""

    launched: Literal["zygote", "cold"] = "cold"

    def __init__(self, popen: "subprocess.Popen[bytes]", process: ProcessHandle) -> None:
        self._popen = popen
        self._process = process

    def fileno(self) -> int:
        return self._process.fileno()

    def poll_exit(self) -> Exit | None:
        try:
            end = self._process.reap()
        except ChildProcessError:
            self._popen.returncode = 0  # already reaped elsewhere: Popen has nothing left to do
            return Exit(launcher_lost=True)
        if end is None:
            return None
        self._popen.returncode = end.si_status
        exited = end.si_code == os.CLD_EXITED
        return Exit(code=end.si_status) if exited else Exit(signal=end.si_status)

    def close(self) -> None: ...


class TrainingProcess:
    """Training process; used by one supervisor thread at a time."""

    def __init__(self, identity: ProcessIdentity, process: ProcessHandle, channel: Channel, fate: ExitWatcher) -> None:
        self.identity = identity
        self.channel = channel
        self.launched = fate.launched
        self._process = process
        self.fate = fate
        """Readable when the exit may be known."""
        self._exit: Exit | None = None
        self._killed = False
        self._record: Path | None = None
        self._orphans: Orphans | None = None
        self._oom_kills = _oom_kills()

    @property
    def pid(self) -> int:
        """Process id, which is also the session id."""
        return self.identity.pid

    def set_record(self, record: Path, orphans: Orphans) -> None:
        """Set the file from which a later worker learns of this process, and who adopts what it leaves.

        `close` removes both.
        """
        self._record, self._orphans = record, orphans

    def send(self, message: ControlMessage) -> bool:
        """Send a message; return False if the process is gone or its socket is full."""
        return self.channel.send(message)

    def poll(self) -> Exit | None:
        """Return the exit of the process, or None while it runs; its earlier output is still in the channel."""
        if self._exit is None:
            end = self.fate.poll_exit()
            if end is not None and end.signal == signal.SIGKILL and not self._killed:
                end = Exit(signal=end.signal, out_of_memory=_oom_kills() > self._oom_kills)
            self._exit = end
        return self._exit

    def wait(self, timeout: float | None) -> None:
        """Wait until the process has sent something or has ended, for at most `timeout` seconds."""
        waiting = select.poll()
        waiting.register(self.channel, select.POLLIN)
        if self._exit is None:
            waiting.register(self.fate, select.POLLIN)
        waiting.poll(None if timeout is None else max(timeout, 0) * 1000)

    def begin_kill(self) -> None:
        """Send SIGKILL to the process alone and wait for nothing; `kill` or `close` must follow."""
        if self._exit is None:
            self._killed = True
        self._process.send_signal(signal.SIGKILL)

    def kill(self) -> list[int]:
        """Kill every process of the session with SIGKILL and wait until all are gone; return their process ids.

        Raises:
            process_group.StillAliveError: One does not die within seconds.
        """
        if self._exit is None:
            self._killed = True
        return process_group.kill_session(self.identity, self._process)

    def close(self) -> Exit:
        """Kill what it has left running and close every descriptor; return the exit of the process.

        Raises:
            process_group.StillAliveError: Processes do not die; the record for a later sweep then stays.
        """
        try:
            self.kill()
            end = self._final_exit()
            if self._orphans is not None:
                self._orphans.kill()
        finally:
            self.channel.close()
            self.fate.close()
            self._process.close()
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        return end

    def _final_exit(self) -> Exit:
        end = self.poll()
        if end is None:
            waiting = select.poll()
            waiting.register(self.fate, select.POLLIN)
            waiting.poll(_END_SECONDS * 1000)
            end = self.poll()
        if end is None:
            raise process_group.StillAliveError(f"process {self.pid} was killed but its exit is not reported")
        return end


def _oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since boot, in all containers.

    It is 0 on a kernel that does not count them.
    """
    with suppress(FileNotFoundError), open("/proc/vmstat") as lines:  # noqa: PTH123
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0

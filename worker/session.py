"""Processes of a training run as the kernel shows them: its session, its end, and what a dead worker left."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from worker.training.journal import boot_id

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 5.0


class StillAliveError(TimeoutError):
    """A process was killed and does not die, as one in uninterruptible sleep does: it may still hold its device."""


@dataclass(frozen=True)
class Identity:
    """A process for all time: ids are reused, an id with its start time, boot and pid namespace is not."""

    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/<pid>/stat."""
    boot_id: str
    namespace: str

    @classmethod
    def of(cls, pid: int, start_time: int) -> "Identity":
        """The identity of a process of this boot and namespace."""
        return cls(pid, start_time, boot_id(), _namespace())

    @property
    def exists(self) -> bool:
        """Whether this very process is still there (on this boot, in this namespace) and not a zombie."""
        stat = _stat(self.pid) if self.boot_id == boot_id() else None
        return stat is not None and stat.start_time == self.start_time and stat.state not in "ZX"


@dataclass(frozen=True)
class _Stat:
    state: str
    session: int
    start_time: int


def start_time(pid: int) -> int:
    """Start time of an existing process (or zombie) in clock ticks since boot; raises ProcessLookupError."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return stat.start_time


def kill_session(leader: Identity, pidfd: int | None = None) -> list[int]:
    """SIGKILL every process of the session that `leader` leads or led, until none is left.

    `pidfd` reaches the leader even before it has become the leader. Returns the process ids hit. Raises
    StillAliveError when processes survive for seconds, as one in uninterruptible sleep does.
    """
    hit: set[int] = set()
    if pidfd is not None and _signal(pidfd):
        hit.add(leader.pid)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = 0.001
    while members := list(_members(leader)):
        if time.monotonic() > deadline:
            raise StillAliveError(f"processes {members} of session {leader.pid} do not die")
        for pid in members:
            if _kill_member(pid, leader):
                hit.add(pid)
        time.sleep(pause)  # they die on their own time; look again until they are gone
        pause = min(pause * 2, 0.05)
    return sorted(hit)


def record(folder: Path, trainer: Identity) -> Path:
    """Write down that this process has started `trainer`, for `sweep` after a crash; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = Identity.of(os.getpid(), start_time(os.getpid()))
    path = folder / f"{trainer.pid}-{trainer.start_time}.json"
    text = json.dumps({"trainer": asdict(trainer), "worker": asdict(worker)})
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
    return path


def sweep(folder: Path) -> list[int]:
    """End what trainers of dead workers left running (loader processes, say); returns the process ids hit.

    Files of an earlier boot are dropped; those of another pid namespace are its own worker's business.
    """
    hit: list[int] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            noted = json.loads(path.read_text())
            trainer, worker = Identity(**noted["trainer"]), Identity(**noted["worker"])
        except (ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        except FileNotFoundError:
            continue
        if trainer.boot_id == boot_id():
            if trainer.namespace != _namespace() or worker.exists:
                continue
            try:
                hit += kill_session(trainer)
            except StillAliveError as error:
                # One in an uninterruptible sleep (a driver or a file system that hangs) holds the lock of its device;
                # the other devices can be used. Its record stays for the next worker.
                log.error("what a dead worker's trainer left running does not die: %s", error)
                continue
        path.unlink(missing_ok=True)
    return hit


def resident_bytes(leader: Identity) -> int:
    """Memory that the processes of the leader's session hold; what two of them share counts twice."""
    held = 0
    for pid in _members(leader):
        try:
            held += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return held * os.sysconf("SC_PAGE_SIZE")


def _members(leader: Identity) -> Iterator[int]:
    """Living processes of the leader's session; none once its id belongs to somebody else."""
    if leader.boot_id != boot_id():
        return
    now = _stat(leader.pid)
    if now is not None and now.start_time != leader.start_time:
        return  # an id is given out again only after its session has no member left
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and _belongs(stat, leader):
                yield int(entry.name)


def _belongs(stat: _Stat, leader: Identity) -> bool:
    return stat.session == leader.pid and stat.start_time >= leader.start_time and stat.state not in "ZX"


def _kill_member(pid: int, leader: Identity) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # Looked at again through the open descriptor: now the id cannot pass to another process unnoticed.
        stat = _stat(pid)
        return stat is not None and _belongs(stat, leader) and _signal(pidfd)
    finally:
        os.close(pidfd)


def _signal(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything
    return _Stat(state=fields[0], session=int(fields[3]), start_time=int(fields[19]))


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())

"""Identity of a process: id, start time, boot and pid namespace."""

import os
from dataclasses import dataclass
from pathlib import Path


def boot_id() -> str:
    """Return the id of this boot of the machine: process ids and CLOCK_BOOTTIME are comparable only within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the pid namespace of this process: a container has its own."""
    return str(Path("/proc/self/ns/pid").readlink())


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/<pid>/stat."""

    state: str
    parent: int
    session: int
    start_time: int
    """Clock ticks since boot."""
    threads: int

    @property
    def has_ended(self) -> bool:
        """True once all its threads have; the state is that of the first, a zombie while others still run."""
        return self.state in "ZX" and self.threads <= 1


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything
    return ProcessStat(
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def start_time(pid: int) -> int:
    """Return the start time of an existing process (or zombie) in clock ticks since boot.

    Raises:
        ProcessLookupError: there is no such process.
    """
    stat = process_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return stat.start_time


@dataclass(frozen=True)
class ProcessIdentity:
    """Permanent identity of a process: ids are reused, an id with its start time, boot and pid namespace is not."""

    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/<pid>/stat."""
    boot_id: str
    namespace: str

    @classmethod
    def of_process(cls, pid: int, start_time: int) -> "ProcessIdentity":
        """Return the identity of a process of this boot and namespace."""
        return cls(pid, start_time, boot_id(), pid_namespace())

    @classmethod
    def of_this_process(cls) -> "ProcessIdentity":
        """Return the identity of this process."""
        return cls.of_process(os.getpid(), start_time(os.getpid()))

    @property
    def is_near(self) -> bool:
        """True if its process id is valid here: same boot and same pid namespace."""
        return (self.boot_id, self.namespace) == (boot_id(), pid_namespace())

    @property
    def exists(self) -> bool:
        """True if this very process still exists (on this boot, in this namespace) and has a thread left."""
        stat = process_stat(self.pid) if self.is_near else None
        return stat is not None and stat.start_time == self.start_time and not stat.has_ended

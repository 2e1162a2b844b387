"""Processes of a training run as the kernel shows them: its session, its end, and leftovers of dead workers."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from app.infra.files.tree import remove_tree
from app.infra.private_files import write_private_json
from app.infra.process.handle import ProcessHandle, open_process
from app.infra.process.identity import ProcessIdentity, ProcessStat, boot_id, pid_namespace, process_stat

log = logging.getLogger(__name__)


_PATIENCE_SECONDS = 5.0


class StillAliveError(TimeoutError):
    """A killed process does not die, as in uninterruptible sleep; it may still hold its device."""


def kill_session(leader: ProcessIdentity, process: ProcessHandle | None = None) -> list[int]:
    """Send SIGKILL to every process of the session that `leader` leads or led, until none is left.

    `process` reaches the leader even before it has become the leader. Returns the ids of the processes killed.

    Raises:
        StillAliveError: Processes survive for seconds, as one in uninterruptible sleep does.
    """
    hit: set[int] = set()
    if process is not None and process.send_signal(signal.SIGKILL):
        hit.add(leader.pid)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = 0.001
    while members := list(_session_members(leader)):
        if time.monotonic() > deadline:
            raise StillAliveError(f"processes {members} of session {leader.pid} do not die")
        for pid in members:
            if _kill_member(pid, leader):
                hit.add(pid)
        time.sleep(pause)  # they die asynchronously; check again until they are gone
        pause = min(pause * 2, 0.05)
    return sorted(hit)


def record_trainer(folder: Path, trainer: ProcessIdentity, meeting: Path | None = None) -> Path:
    """Record that this process has started `trainer`, for `kill_leftovers` after a crash; return the file.

    `meeting` is the folder in which the processes of its run meet, which is removed with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{trainer.pid}-{trainer.start_time}.json"
    noted = {
        "trainer": asdict(trainer),
        "worker": asdict(ProcessIdentity.of_this_process()),
        "meeting": str(meeting) if meeting else None,
    }
    write_private_json(path, noted, durable=False)
    return path


def kill_leftovers(folder: Path) -> list[int]:
    """Kill what trainers of dead workers left running (such as loader processes); return the process ids.

    The folders in which they met are removed.

    Records of an earlier boot are removed; those of another pid namespace are left to its own worker.
    """
    hit: list[int] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            noted = json.loads(path.read_text())
            trainer, worker = ProcessIdentity(**noted["trainer"]), ProcessIdentity(**noted["worker"])
        except (ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        except FileNotFoundError:
            continue
        if trainer.boot_id == boot_id():
            if trainer.namespace != pid_namespace() or worker.exists:
                continue
            try:
                hit += kill_session(trainer)
            except StillAliveError as error:
                # A process in uninterruptible sleep (a driver or a file system that hangs) holds the lock of its
                # device; the other devices can be used. Its record stays for the next worker.
                log.error("processes left running by a dead worker's trainer do not die: %s", error)
                continue
        if meeting := noted.get("meeting"):
            remove_tree(Path(meeting), ignore_errors=True)
        path.unlink(missing_ok=True)
    return hit


def resident_bytes(leader: ProcessIdentity) -> int:
    """Return the memory of the processes of the leader's session in bytes; shared memory counts for each of them."""
    held = 0
    for pid in _session_members(leader):
        try:
            held += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return held * os.sysconf("SC_PAGE_SIZE")


def _session_members(leader: ProcessIdentity) -> Iterator[int]:
    """Yield the living processes of the leader's session; none once its id belongs to another process."""
    if leader.boot_id != boot_id():
        return
    now = process_stat(leader.pid)
    if now is not None and now.start_time != leader.start_time:
        return  # an id is reused only after its session has no member left
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = process_stat(int(entry.name))
            if stat is not None and _is_member(stat, leader):
                yield int(entry.name)


def _is_member(stat: ProcessStat, leader: ProcessIdentity) -> bool:
    return stat.session == leader.pid and stat.start_time >= leader.start_time and not stat.has_ended


def _kill_member(pid: int, leader: ProcessIdentity) -> bool:
    try:
        process = open_process(pid)
    except ProcessLookupError:
        return False
    with process:
        # Checked again with the process open: now the id cannot pass to another process unnoticed.
        stat = process_stat(pid)
        return stat is not None and _is_member(stat, leader) and process.send_signal(signal.SIGKILL)

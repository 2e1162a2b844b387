"""Launch of the training processes of an attempt on this host, one for each device."""

import os
import pwd
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.infra.files.tree import remove_tree
from worker.context import WorkerContext
from worker.devices import Device
from worker.lease import Lease
from worker.process.spawn import LaunchAbandoned
from worker.process.training_group import TrainingGroup
from worker.process.training_process import TrainingProcess
from worker.wire.rank_place import RankPlace


@dataclass(frozen=True)
class Group:
    """Training processes to start on this host."""

    entry: str
    job_path: Path
    secrets: Mapping[str, str] = field(repr=False)
    lock: Path | None = None
    """Kernel lock of the run, which its rank 0 holds: not only the lease rules out two trainers on one machine."""


@dataclass(frozen=True)
class Meeting:
    """Place at which the ranks of several hosts meet, and those of this host among them."""

    place: str
    first_rank: int
    size: int

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of rank 0."""
        host, _, port = self.place.removeprefix("tcp://").rpartition(":")
        return host, int(port)


def launch_processes(
    context: WorkerContext,
    lease: Lease,
    group: Group,
    assigned: Sequence[Device],
    is_unwanted: Callable[[], bool],
    meeting: Meeting | None = None,
) -> TrainingGroup:
    """Start a training process for each device, with its deadline in force before it does anything.

    Raises:
        LaunchAbandoned: They are no longer wanted (`is_unwanted`).
        LaunchError: A process could not be started; none is left.
    """
    if is_unwanted():
        raise LaunchAbandoned("no longer wanted")
    folder: Path | None = None
    if meeting is None and len(assigned) > 1:
        folder = _rank_folder(context.settings.trainer_user)
    first_rank = meeting.first_rank if meeting else 0
    started: list[TrainingProcess] = []
    try:
        for local_rank, device in enumerate(assigned):
            rank = first_rank + local_rank
            process = context.launcher.launch(
                group.entry,
                group.job_path,
                [one.for_job() for one in assigned],
                [_device_lock(context, device), *([group.lock] if rank == 0 and group.lock else [])],
                place=_rank_place(context, rank, local_rank, len(assigned), folder, meeting),
                renew_until=lambda: lease.kill_at,
                should_end=is_unwanted,
                secrets=group.secrets,
            )
            started.append(process)
    except BaseException:
        _build_group(started, folder, first_rank).close()
        raise
    processes = _build_group(started, folder, first_rank)
    lease.guard(processes)
    return processes


def _build_group(started: Sequence[TrainingProcess], folder: Path | None, first_rank: int) -> TrainingGroup:
    group = TrainingGroup(started, first_rank)
    if folder is not None:
        group.at_end(lambda: remove_tree(folder, ignore_errors=True))
    return group


def _rank_place(
    context: WorkerContext,
    rank: int,
    local_rank: int,
    local_size: int,
    folder: Path | None,
    meeting: Meeting | None,
) -> RankPlace | None:
    if meeting is not None:
        interface = context.settings.group_interface or "lo"
        return RankPlace(rank, meeting.size, meeting.place, local_rank, local_size, interface)
    return None if folder is None else RankPlace.on_one_host(rank, local_size, folder)


def _device_lock(context: WorkerContext, device: Device) -> Path:
    """Return the lock of a device: workers of a machine share a GPU, and a share of the CPU is the worker's own."""
    owner = device.id if device.kind == "cuda" else f"{context.id}-{device.id}"
    path = context.settings.home / "run" / "devices" / owner
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _rank_folder(user: str | None) -> Path:
    """Create a folder on this host that only the training processes can read."""
    folder = Path(tempfile.mkdtemp(prefix="anneal-ranks-"))
    if user:
        account = pwd.getpwnam(user)
        os.chown(folder, account.pw_uid, account.pw_gid)
    return folder

"""Place of a training process in a run on several devices, and its exit codes when it lacks the others."""

from dataclasses import dataclass
from pathlib import Path

EXIT_PEER_LOST = 75
"""Exit code of a process that ended because another one of the run did: it is never the cause of an end."""
EXIT_RANK_ZERO_UNREACHABLE = 76
"""Exit code of a process that could not reach rank 0 of a run on several hosts."""


@dataclass(frozen=True)
class RankPlace:
    """Place of a process among those that train a run together."""

    rank: int
    """Number of the process, from 0. Rank 0 decides, reports and writes."""
    size: int
    """Number of processes, one for each device."""
    meeting: str
    """Place at which they find each other: a folder on this host, or `tcp://address:port` of rank 0 for several."""
    local_rank: int
    """Number of its device among those of the run on this host."""
    local_size: int
    """Number of processes of the run on this host."""
    interface: str = "lo"
    """Network interface over which the processes exchange data."""

    @classmethod
    def on_one_host(cls, rank: int, size: int, folder: Path) -> "RankPlace":
        """Return the place of a process in a run whose processes are all on this host."""
        return cls(rank, size, str(folder), rank, size)

    @property
    def address(self) -> tuple[str, int] | None:
        """Address and port at which rank 0 listens; None for one host."""
        host, _, port = self.meeting.removeprefix("tcp://").rpartition(":")
        return (host, int(port)) if self.meeting.startswith("tcp://") else None

    @property
    def folder(self) -> Path | None:
        """Folder in which the processes find each other; None for several hosts."""
        return None if self.address else Path(self.meeting)

    def arguments(self) -> list[str]:
        """Return the arguments of a training process from which `parse_args` reads it."""
        return [
            "--rank", str(self.rank), "--ranks", str(self.size), "--meeting", self.meeting,
            "--local-rank", str(self.local_rank), "--local-ranks", str(self.local_size),
            "--interface", self.interface,
        ]  # fmt: skip

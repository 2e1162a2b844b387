"""Place of a training process in a run on several devices, and the exit code of one that lost the others."""

from dataclasses import dataclass
from pathlib import Path

EXIT_PEER_LOST = 75
"""Exit code of a process that ended because another one of the run did: it is never the cause of an end."""


@dataclass(frozen=True)
class RankPlace:
    """Place of a process among those that train a run together."""

    rank: int
    """Number of the process, from 0. Rank 0 decides, reports and writes."""
    size: int
    """Number of processes, one for each device."""
    folder: Path
    """Folder on this host in which the processes find each other."""

    def arguments(self) -> list[str]:
        """Return the arguments of a training process from which `parse_args` reads it."""
        return ["--rank", str(self.rank), "--ranks", str(self.size), "--rank-folder", str(self.folder)]

"""Runs of the training process on any number of devices, without a supervisor."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.worker.training.tiny import Forks, Outcome
from worker.wire.rank_place import RankPlace


class ManyRanks:
    """Servers of fresh processes, one for each rank; the first one's are rank 0, which reports the run."""

    def __init__(self, servers: Sequence[Forks]) -> None:
        self._servers = servers

    def run(self, job: dict[str, Any]) -> Outcome:
        """Run a job to its end on all, of which none but the first may fail; return what the first reported."""
        with tempfile.TemporaryDirectory() as meeting:
            for rank, server in reversed(list(enumerate(self._servers))):
                place = RankPlace.on_one_host(rank, len(self._servers), Path(meeting))
                said = {} if rank == 0 else {name: self._said(job, name, rank) for name in ("stdout", "stderr")}
                server.start(job, arguments=place.arguments(), **said)
            ends = [server.wait() for server in self._servers[1:]]
            outcome = self._servers[0].wait()
        for rank, end in enumerate(ends, 1):
            assert end.code == 0, (rank, Path(self._said(job, "stderr", rank)).read_text()[-3000:])
        return outcome

    @staticmethod
    def _said(job: dict[str, Any], name: str, rank: int) -> str:
        return str(Path(job["attempt_dir"]) / f"{name}-{rank}")

"""Runs of the training process on two devices, without a supervisor."""

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.worker.training.tiny import Forks, Outcome, parse_records
from worker.wire.rank_place import RankPlace

_SAID = {"stdout": "stdout-1", "stderr": "stderr-1"}
"""Files of the second process."""
_MOST_SECONDS = 120


class TwoRanks:
    """Two servers of fresh processes: the first one's are rank 0, which reports the run, and the other's rank 1."""

    def __init__(self, first: Forks, second: Forks) -> None:
        self.first, self.second = first, second

    def beside(self, *folders: Path) -> "TwoRanks":
        """Return the same for jobs that import from these folders too."""
        return TwoRanks(self.first.beside(*folders), self.second.beside(*folders))

    def run(self, job: dict[str, Any], second_job: dict[str, Any] | None = None, **limits: Any) -> Outcome:
        """Run a job to its end on both, of which the second must not fail; return what the first reported.

        `second_job` is that of the second, if it has another one, and `limits` are those of the first, as `Forks.run`
        takes them.
        """
        with self._started(job, second_job=second_job, **limits) as (process, _):
            other = self.second.wait()
            if other.code:
                _kill(process)  # it may wait for the other one, as a supervisor would not let it
            outcome = self.first.wait()
        folder, names = (job, _SAID.values()) if second_job is None else (second_job, _SAID)
        said = [Path(folder["attempt_dir"]) / name for name in names]
        assert other.code == 0, (outcome.records[-1:], said[1].read_text()[-3000:])
        assert parse_records(said[0].read_text()) == [], "rank 0 reports the run"
        return outcome

    def run_to_end_of_first(self, job: dict[str, Any], second: dict[str, Any] | None = None, **limits: Any) -> Outcome:
        """Run a job until the first has ended, then end the second; return what the first reported.

        `limits` are those of the first, `second` those of the other one.
        """
        with self._started(job, second, **limits) as (_, other):
            outcome = self.first.wait()
            _kill(other)
            self.second.wait()
        return outcome

    def run_each(self, jobs: Sequence[dict[str, Any]]) -> tuple[Outcome, Outcome]:
        """Run a job of its own on each, as on two hosts with other files; return what both reported."""
        with tempfile.TemporaryDirectory() as meeting:
            places = [RankPlace.on_one_host(rank, 2, Path(meeting)) for rank in (0, 1)]
            self.second.start(jobs[1], arguments=places[1].arguments())
            self.first.start(jobs[0], arguments=places[0].arguments())
            return self.first.wait(), self.second.wait()

    def run_until_death(
        self, job: dict[str, Any], rank: int, disk: dict[str, Any], second_job: dict[str, Any] | None = None
    ) -> tuple[Outcome, Outcome]:
        """Run a job in which one of the two is killed or fails, as `disk` of `troubles` says.

        The other one must end by itself, without a supervisor that kills it. Returns what both reported. `second_job`
        is that of the second, if it has another one.
        """
        limits = [{"disk": json.dumps(disk)} if rank == one else {} for one in (0, 1)]
        with self._started(job, limits[1], second_job, **limits[0]) as processes:
            too_long = threading.Timer(_MOST_SECONDS, _kill, [processes[1 - rank]])
            too_long.start()
            second = self.second.wait()
            first = self.first.wait()
            too_long.cancel()
        return first, second

    @contextmanager
    def _started(
        self,
        job: dict[str, Any],
        others: dict[str, Any] | None = None,
        second_job: dict[str, Any] | None = None,
        **limits: Any,
    ) -> Iterator[tuple[int, int]]:
        with tempfile.TemporaryDirectory() as meeting:
            first, second = (RankPlace.on_one_host(rank, 2, Path(meeting)).arguments() for rank in (0, 1))
            said = {what: str(Path(job["attempt_dir"]) / name) for what, name in _SAID.items()}
            if second_job is not None:  # it writes to a folder of its own
                said = {}
            other = self.second.start(second_job or job, arguments=second, **said, **(others or {}))
            yield self.first.start(job, arguments=first, **limits), other


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)

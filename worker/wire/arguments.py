"""Arguments of a training process."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import ErrorInfo
from worker.wire.rank_place import RankPlace
from worker.wire.reporter import Reporter


class Arguments(NamedTuple):
    """Arguments of a training process."""

    job: JobSpec
    report_fd: int | None
    """Descriptor for records; None in a run by hand."""
    control_fd: int | None
    """Descriptor for control messages; None in a run by hand."""
    place: RankPlace | None
    """None for a run on one device."""


def parse_args(argv: Sequence[str]) -> Arguments:
    """Parse the arguments of a training process.

    They are `job.json [--report-fd N] [--control-fd M] [--rank R --ranks S --meeting WHERE --local-rank L
    --local-ranks K --interface NAME]`. A file that is no
    valid job is reported as a failed result, and ends the process.
    """
    parser = argparse.ArgumentParser(description="Run one training job.")
    parser.add_argument("job", type=Path, help="JSON file that describes the job")
    parser.add_argument("--report-fd", type=int, default=None, help="send records here, not to standard output")
    parser.add_argument("--control-fd", type=int, default=None, help="receive control messages here")
    parser.add_argument("--rank", type=int, default=0, help="number of this process among those of the run")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes of the run, one for each device")
    parser.add_argument("--meeting", default=None, help="folder, or tcp://address:port, at which they find each other")
    parser.add_argument("--local-rank", type=int, default=0, help="number of this process among those of this host")
    parser.add_argument("--local-ranks", type=int, default=1, help="number of processes of the run on this host")
    parser.add_argument("--interface", default="lo", help="network interface over which they exchange data")
    parsed = parser.parse_args(list(argv))
    place = None
    if parsed.meeting is not None:
        local = (parsed.local_rank, parsed.local_ranks)
        place = RankPlace(parsed.rank, parsed.ranks, parsed.meeting, *local, parsed.interface)
    try:
        return Arguments(JobSpec.from_file(parsed.job), parsed.report_fd, parsed.control_fd, place)
    except (OSError, ValueError) as problem:
        message = f"The job file {parsed.job.name} cannot be read: {problem}"
        error: ErrorInfo = {"code": "internal", "message": message}
        Reporter(parsed.report_fd).send({"type": "result", "outcome": "failed", "error": error})
        sys.exit(1)

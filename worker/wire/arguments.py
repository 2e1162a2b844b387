"""Arguments of a training process."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from app.contracts.attempt.job import JobSpec
from worker.wire.reporter import Reporter


def parse_args(argv: Sequence[str]) -> tuple[JobSpec, int | None, int | None]:
    """Parse the arguments of a training process: `job.json [--report-fd N] [--control-fd M]`.

    Returns the job, the descriptor for records and the one for control messages; both are None in a run by hand. A file
    that is no valid job is reported as a failed result, and ends the process.
    """
    parser = argparse.ArgumentParser(description="Run one training job.")
    parser.add_argument("job", type=Path, help="JSON file that describes the job")
    parser.add_argument("--report-fd", type=int, default=None, help="send records here, not to standard output")
    parser.add_argument("--control-fd", type=int, default=None, help="receive control messages here")
    parsed = parser.parse_args(list(argv))
    try:
        return JobSpec.read(parsed.job), parsed.report_fd, parsed.control_fd
    except (OSError, ValueError) as problem:
        message = f"The job file {parsed.job.name} cannot be read: {problem}"
        Reporter(parsed.report_fd).result("failed", error={"code": "internal", "message": message})
        sys.exit(1)

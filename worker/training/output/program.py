"""Runs programs of llama.cpp, which the operator installs.

Each runs in a process group of its own within the session of the training process, so it ends with that.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.infra.process.children import last_lines
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure

_STALLED_SECONDS = 600.0
"""A program is ended if it writes nothing, neither weights nor messages, for this long."""
_POLL_SECONDS = 0.1
_MOST_CHARACTERS = 1000
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Nothing of the training process, whose environment may have secrets. The converter does not reach the hub, because it
executes the code of tokenizers that name some there."""

Measure = Callable[[str], tuple[int, int] | None]
"""Returns the completed part and the whole, from the last lines of a program; None if they are not known."""


@dataclass(frozen=True)
class EndedProgram:
    """Exit and output of a program that has ended."""

    status: int
    output: str
    """Standard output and standard error, as they were written."""

    @property
    def reason(self) -> str:
        """Its exit status with its last lines."""
        ended = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        lines = "\n".join(self.output.splitlines()[-5:])[-_MOST_CHARACTERS:]
        return f"{ended}, and its last lines are:\n{lines}" if lines else f"{ended}, without a message."


@dataclass(frozen=True)
class Progress:
    """Progress of a program, in events of the run."""

    message: str
    measure: Measure


def run_program(
    run: TrainingContext,
    name: str,
    command: Sequence[str],
    written: Path | None = None,
    progress: Progress | None = None,
) -> EndedProgram:
    """Run a program to its end, with heartbeats and progress; `written` is a file that grows while it works.

    Raises:
        TrainingFailure: it cannot be started, or writes nothing for long.
        Stopped: a stop was requested.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder / ".gguf.log"
    try:
        with _started_process(name, command, log) as process:
            _wait_with_heartbeats(run, name, process, [log, *([written] if written else [])], progress)
        return EndedProgram(process.returncode, log.read_text(errors="replace"))
    finally:
        log.unlink(missing_ok=True)


@contextmanager
def _started_process(name: str, command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it and its descendants at the end of the block.

    Both output streams go to `log`.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_ENVIRONMENT,
                process_group=0,
            )
        except OSError as error:
            raise TrainingFailure("config_error", f"{name} cannot be started: {error}.") from error
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so the id is still that of its group
        process.wait()


def _wait_with_heartbeats(
    run: TrainingContext,
    name: str,
    process: subprocess.Popen[bytes],
    written: Sequence[Path],
    progress: Progress | None,
) -> None:
    before, grown_at, percent = -1, time.monotonic(), -1
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        run.raise_if_stopped()
        run.report.alive()
        size, now = sum(path.stat().st_size for path in written if path.exists()), time.monotonic()
        if size != before:
            before, grown_at = size, now
            if progress is not None and (part := progress.measure(last_lines(written[0]))) is not None:
                done, total = part
                if done * 100 // total != percent:
                    percent = done * 100 // total
                    run.report_progress("exporting", done, total, progress.message)
        elif now - grown_at > _STALLED_SECONDS:
            message = f"{name} wrote nothing for {_STALLED_SECONDS:,.0f} seconds, and was ended."
            raise TrainingFailure("config_error", message)
        time.sleep(_POLL_SECONDS)

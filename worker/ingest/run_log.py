"""Log of a run: lines of its processes and of the service, in the event log and in the complete log of the attempt."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from anneal.contracts.attempt.records import COMPLETE_LOG
from app.infra.terminal_text import plain_text
from app.runs.events.log import NewEvent
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.log_file import LogFile
from worker.ingest.log_lines import LogLines, Stream
from worker.ingest.redaction import Redactor
from worker.ingest.sink import EventSink


class RunLog:
    """Log of one attempt on this host; secrets are masked in it."""

    def __init__(
        self, context: WorkerContext, run: ClaimedRun, sink: EventSink, tail: deque[str], log_name: str
    ) -> None:
        """Write the complete log of this host's ranks to the files named `log_name` in the attempt's folder.

        The last lines are added to `tail`.
        """
        self.redactor = Redactor()
        self._context = context
        self._run = run
        self._sink = sink
        self._tail = tail
        self._log_name = log_name
        self._lines: dict[int, LogLines] = {}
        """Unfinished lines of each rank."""
        self.printed_at = 0.0
        """Time of the output that is being handled, in seconds since 1970."""
        self._file = LogFile(
            context.storage.attempt_dir(run.id, run.attempt),
            log_name,
            context.settings.disk_reserve_bytes,
            lambda problem: self.log_line(problem, "warning"),
        )
        self._is_short = False
        """True while printed lines are not stored, because the disk of the database has little room."""

    def hide_secrets(self, secrets: Iterable[str]) -> None:
        """Mask these values in the output from now on."""
        self.redactor.hide_values(secrets)

    def log_line(self, line: str, level: str = "info") -> None:
        """Add a line from the service itself."""
        now = time.time()
        said = {"line": plain_text(line), "stream": "anneal", "level": level}
        self._file.add_line(said, now)
        self._add_lines([said], now)
        self._file.flush()

    def log_message(self, line: str, level: str, ts: float) -> None:
        """Add a line that the trainer has reported; it is not among the last ones that explain an end."""
        said = {"line": plain_text(line), "stream": "anneal", "level": level}
        self._file.add_line(said, self.printed_at)
        self._sink.enqueue_item(NewEvent.from_payload("log", ts, said))

    def add_output(self, rank: int, stream: Stream, data: bytes) -> None:
        """Add what a rank has printed; lines of ranks other than 0 are stored with their rank."""
        self._add_lines(self._lines_of(rank).feed(stream, data, time.monotonic()), self.printed_at)

    def flush(self) -> None:
        """Pass the lines of the complete log on to the system."""
        self._file.flush()

    def close(self) -> None:
        """Handle the end of the output: what is left of a line becomes a line, and the complete log is closed."""
        self.printed_at = time.time()
        for lines in self._lines.values():
            self._add_lines(lines.flush(), self.printed_at)
        self._file.close()

    def _lines_of(self, rank: int) -> LogLines:
        if rank not in self._lines:
            self._lines[rank] = LogLines(
                redact=self.redactor,
                label=f"[rank {rank}] " if rank else "",
                on_line=lambda line: self._file.add_line(line, self.printed_at),
                place=self._place_of_complete_log,
                shortage=self._describe_shortage,
            )
        return self._lines[rank]

    def _place_of_complete_log(self) -> str:
        if not self._file.is_complete:
            return ""  # the log has a line that says why
        if self._log_name != COMPLETE_LOG and self._context.working_copy is not None:
            return "; a file on the worker of this rank has them"  # only the lead sends records to the object store
        return f"; the complete log has them: `anneal runs logs --all {self._run.id} --attempt {self._run.attempt}`"

    def _describe_shortage(self) -> str | None:
        """Return why printed lines are not stored now: they would take the room of everything else."""
        reserve = self._context.database_reserve
        shortage = reserve.describe_shortage(self._context.settings.disk_reserve_bytes) if reserve is not None else None
        if shortage and not self._is_short:
            self.log_line(
                f"printed lines are not stored from here on, because {shortage}; the last ones follow", "warning"
            )
        self._is_short = shortage is not None
        return shortage

    def _add_lines(self, lines: Sequence[dict[str, Any]], now: float) -> None:
        for line in lines:
            self._tail.append(line["line"])
            self._sink.enqueue_item(NewEvent.from_payload("log", now, line))

"""`push_to_hub`: upload of a run's output to the Hugging Face hub, as one commit.

The run already has its output when the upload starts, so an error here never fails the run: it is reported, and the
output can still be pushed by hand.
"""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants, get_token

from app.contracts.attempt.messages import HubPush
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure

_TRIES = 5
_FIRST_PAUSE = 1.0
_STALLED_SECONDS = 300.0
"""An upload is given up if the hub accepts no byte and sends no response for this long."""
_POLL_SECONDS = 0.1


def check(run: TrainingContext) -> None:
    """Check before training that the output can be pushed.

    A run that has already trained is not failed here: it reports at its end why the output was not pushed.

    Raises:
        TrainingFailure: `config_error`.
    """
    if run.config.push_to_hub is not None and run.resume_from is None:
        refusal = _refusal(run)
        if refusal:
            raise TrainingFailure("config_error", refusal)


def push(run: TrainingContext, output: Path) -> HubPush | None:
    """Upload every file of `output` if the run asks for it, and return the outcome for the result record.

    Raises:
        Stopped: the worker is draining; the run's next attempt pushes the output.
    """
    name = run.config.push_to_hub
    if name is None:
        return None
    run.report.phase("pushing")
    try:
        refusal = _refusal(run)
        if refusal:
            raise TrainingFailure("config_error", refusal)
        made = _Push(run, output, name).run_to_end()
    except Stopped:
        request = run.stop_requested
        if request is not None and request.why == "drain":
            raise
        return _failed(run, name, "a stop was requested")
    except Exception as error:
        return _failed(run, name, _root_cause(error))
    run.report.message(f"Pushed to the hub: {made.commit_url}")
    return {"repo": name, "commit": made.oid, "url": made.commit_url}


class _Push:
    """One upload, in its own thread, so that a run can be stopped while the hub does not respond."""

    def __init__(self, run: TrainingContext, output: Path, name: str) -> None:
        self._run = run
        self._name = name
        self._files = [path for path in sorted(output.rglob("*")) if path.is_file()]
        self._output = output
        # Each file is read twice: for its hash, and to be sent.
        self._total = 2 * sum(path.stat().st_size for path in self._files)
        self._read = 0
        self._last_progress_at = time.monotonic()
        self._abandoned = threading.Event()
        self._done = threading.Event()
        self._outcome: CommitInfo | Exception = AssertionError("the upload has no outcome")

    def run_to_end(self) -> CommitInfo:
        """Run the upload to its end; raise Stopped at once on a stop request, TimeoutError when it stalls."""
        threading.Thread(target=self._work, name="push", daemon=True).start()
        try:
            while not self._done.wait(_POLL_SECONDS):
                self._run.progress("pushing", min(self._read, self._total - 1), self._total)
                if time.monotonic() - self._last_progress_at > _STALLED_SECONDS:
                    raise TimeoutError(f"no progress for {_STALLED_SECONDS:.0f} s")
        finally:
            self._abandoned.set()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        self._run.report.progress("pushing", self._total, self._total)
        return self._outcome

    def count_bytes(self, count: int) -> None:
        """Count bytes read from a file; raise Stopped in the upload thread if no one waits for it any more."""
        if self._abandoned.is_set():
            raise Stopped
        self._read += count
        self._last_progress_at = time.monotonic()
        self._run.report.alive()

    def _work(self) -> None:
        try:
            self._outcome = self._upload()
        except Exception as error:
            self._outcome = error
        self._done.set()

    def _upload(self) -> CommitInfo:
        api = HfApi(endpoint=constants.ENDPOINT, token=get_token())
        for pause in _pauses():
            self._read = 0
            try:
                # An existing repository keeps its visibility.
                api.create_repo(self._name, private=True, exist_ok=True)
                return api.create_commit(
                    self._name,
                    list(self._operations()),
                    commit_message=f"Run {self._run.job.run_id} of Anneal, attempt {self._run.job.attempt}",
                )
            except Exception as error:
                if pause is None or not _is_transient(error) or self._abandoned.is_set():
                    raise
                self._run.report.message(
                    f"The hub did not accept the output ({_root_cause(error)}); retrying.", "warning"
                )
                self._abandoned.wait(pause)
                self._last_progress_at = time.monotonic()
        raise AssertionError("the last attempt returns or raises")

    def _operations(self) -> Iterator[CommitOperationAdd]:
        for path in self._files:
            file = io.BufferedReader(_CountingFile(path, self.count_bytes))
            yield CommitOperationAdd(path.relative_to(self._output).as_posix(), file)


class _CountingFile(io.FileIO):
    """A file that reports how many bytes are read from it."""

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._on_read(count)
        return count


def _pauses() -> Iterator[float | None]:
    """Yield the pause in seconds before each retry, and None after the last one."""
    yield from (_FIRST_PAUSE * 2**number for number in range(_TRIES - 1))
    yield None


def _refusal(run: TrainingContext) -> str | None:
    if not run.job.hub_allowed:
        return "`push_to_hub` needs the hub, which the operator has disabled on this worker (ANNEAL_ALLOW_HUB)."
    if get_token() is None:
        return "`push_to_hub` needs a token: an admin sets it with `anneal secrets set hf_token`."
    return None


def _failed(run: TrainingContext, name: str, why: str) -> HubPush:
    run.report.message(
        f"The output was not pushed to {name}: {why}. The run is complete and keeps its output: download it "
        f"(GET /v1/runs/{run.job.run_id}/artifacts.tar) and push it with `hf upload {name} <folder>`.",
        level="error",
    )
    return {"repo": name, "error": why}


def _root_cause(error: BaseException) -> str:
    """Return the root cause in one line; huggingface_hub wraps it in a message about a file."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def _is_transient(error: BaseException | None) -> bool:
    """Return True if a retry may succeed: the hub is unreachable, overloaded or failing, and has not refused."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        # Compared by name, since huggingface_hub has its own HTTP client.
        if isinstance(error, OSError) or any(one.__name__ == "TransportError" for one in type(error).__mro__):
            return True
        error = error.__cause__
    return False

"""`push_to_hub`: the output of a run, uploaded to the Hugging Face hub as one commit.

By the time this begins the run has its output. So nothing here can fail it: what goes wrong is told, and the output
stays to be pushed by hand.
"""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants, get_token

from worker.training.failures import Stopped, TrainingFailure
from worker.training.run import Run

_TRIES = 5
_FIRST_PAUSE = 1.0
_STALLED_SECONDS = 300.0
"""A hub that takes no byte and gives no answer for so long is left alone."""
_LOOK_SECONDS = 0.1


def check(run: Run) -> None:
    """Before anything is trained: whether the output could be pushed at all.

    A run that has trained already is not held up here: it says at its end why it was not pushed.

    Raises:
        TrainingFailure: `config_error`.
    """
    if run.config.push_to_hub is not None and run.resume_from is None:
        refusal = _refusal(run)
        if refusal:
            raise TrainingFailure("config_error", refusal)


def push(run: Run, output: Path) -> dict[str, Any] | None:
    """Upload every file of `output`, if the run is to be pushed; returns what became of it, for the result.

    Raises:
        Stopped: the worker is to end; whoever takes up the run pushes it.
    """
    name = run.config.push_to_hub
    if name is None:
        return None
    run.report.phase("pushing")
    try:
        refusal = _refusal(run)
        if refusal:
            raise TrainingFailure("config_error", refusal)
        made = _Push(run, output, name).to_the_end()
    except Stopped:
        request = run.stop_requested
        if request is not None and request.why == "drain":
            raise
        return _failed(run, name, "a stop was requested")
    except Exception as error:
        return _failed(run, name, _why(error))
    run.report.message(f"Pushed to the hub: {made.commit_url}")
    return {"repo": name, "commit": made.oid, "url": made.commit_url}


class _Push:
    """One upload, in a thread of its own: a hub that does not answer keeps nobody from stopping it."""

    def __init__(self, run: Run, output: Path, name: str) -> None:
        self._run = run
        self._name = name
        self._files = [path for path in sorted(output.rglob("*")) if path.is_file()]
        self._output = output
        # Each file is read twice: for its hash, and to be sent.
        self._total = 2 * sum(path.stat().st_size for path in self._files)
        self._read = 0
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._done = threading.Event()
        self._outcome: CommitInfo | Exception = AssertionError("nothing came of it")

    def to_the_end(self) -> CommitInfo:
        """Upload all of it; Stopped at once when a stop comes, TimeoutError when nothing moves for long."""
        threading.Thread(target=self._work, name="push", daemon=True).start()
        try:
            while not self._done.wait(_LOOK_SECONDS):
                self._run.progress("pushing", min(self._read, self._total - 1), self._total)
                if time.monotonic() - self._moved_at > _STALLED_SECONDS:
                    raise TimeoutError(f"nothing moved for {_STALLED_SECONDS:.0f} s")
        finally:
            self._over.set()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        self._run.report.progress("pushing", self._total, self._total)
        return self._outcome

    def took(self, count: int) -> None:
        """So many bytes of a file were read; ends the thread where nobody waits for it any more."""
        if self._over.is_set():
            raise Stopped
        self._read += count
        self._moved_at = time.monotonic()
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
                # One that is there already stays as visible as it is.
                api.create_repo(self._name, private=True, exist_ok=True)
                return api.create_commit(
                    self._name,
                    list(self._operations()),
                    commit_message=f"Run {self._run.job['run_id']} of Anneal, attempt {self._run.job['attempt']}",
                )
            except Exception as error:
                if pause is None or not _passes(error) or self._over.is_set():
                    raise
                self._run.report.message(f"The hub did not take the output ({_why(error)}); trying again.", "warning")
                self._over.wait(pause)
                self._moved_at = time.monotonic()
        raise AssertionError("the last try returns or raises")

    def _operations(self) -> Iterator[CommitOperationAdd]:
        for path in self._files:
            file = io.BufferedReader(_Told(path, self.took))
            yield CommitOperationAdd(path.relative_to(self._output).as_posix(), file)


class _Told(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, took: Callable[[int], None]) -> None:
        super().__init__(path)
        self._took = took

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._took(count)
        return count


def _pauses() -> Iterator[float | None]:
    """Before each further try; None before there is none."""
    yield from (_FIRST_PAUSE * 2**number for number in range(_TRIES - 1))
    yield None


def _refusal(run: Run) -> str | None:
    if run.job.get("offline"):
        return "`push_to_hub` needs the hub, which this worker's operator has switched off (ANNEAL_ALLOW_HUB)."
    if get_token() is None:
        return "`push_to_hub` needs a token: an admin sets it with `anneal secrets set hf_token`."
    return None


def _failed(run: Run, name: str, why: str) -> dict[str, Any]:
    run.report.message(
        f"The output was not pushed to {name}: {why}. The run is complete and keeps its output: download it "
        f"(GET /v1/runs/{run.job['run_id']}/artifacts.tar) and push it with `hf upload {name} <folder>`.",
        level="error",
    )
    return {"repo": name, "error": why}


def _why(error: BaseException) -> str:
    """The first cause, in a line: huggingface_hub wraps it in words about a file."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def _passes(error: BaseException | None) -> bool:
    """Whether a later try may fare better: the hub is away, overloaded or broken, and has not refused."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        # By its name, since huggingface_hub brings an HTTP client of its own.
        if isinstance(error, OSError) or any(one.__name__ == "TransportError" for one in type(error).__mro__):
            return True
        error = error.__cause__
    return False

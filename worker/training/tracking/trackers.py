"""Experiment trackers (`report_to`): every metric of a run is also sent to them, from one thread each.

A tracker that is unreachable, slow or failing never delays training: its points wait in a bounded queue, are retried,
and are finally dropped with a message to the user. The clients are in `clients.py`.
"""

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.fields import TrainingConfig
from worker.training.failures import TrainingFailure
from worker.training.tracking.clients import Mlflow, Status, TensorBoard, TrackedPoint, Tracker, Wandb
from worker.wire.reporter import Reporter

_MAX_QUEUED = 10_000
"""Limit of points queued for a tracker; with one point every ten steps, those of 100,000 steps."""
_BATCH_SIZE = 200
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 60.0
_FINAL_TRIES = 5
_SETTLE_SECONDS = 5.0
_FLUSH_SECONDS: dict[Status, float] = {"completed": 15.0, "failed": 15.0, "cancelled": 5.0, "pending": 5.0}
"""Time that the end of a run waits for its trackers; shorter after a stop, since the user waits too."""

_KINDS: dict[str, Callable[[JobSpec, str], Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


class TrackerQueue:
    """Queue of what is sent to one tracker, in order, and the thread that sends it."""

    def __init__(self, name: str, tracker: Tracker, report: Reporter) -> None:
        self.name = name
        self._tracker = tracker
        self._report = report
        self._waiting: deque[TrackedPoint] = deque()
        self._parameters: Mapping[str, Any] | None = None
        self._status: Status | None = None
        self._is_done = self._is_given_up = False
        self._dropped = 0
        self._has_warned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send_points, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def describe(self, parameters: Mapping[str, Any]) -> None:
        """Queue the parameters of the run; call before the first point."""
        with self._changed:
            self._parameters = parameters
            self._changed.notify_all()

    def add_point(self, point: TrackedPoint) -> None:
        """Queue one point without waiting; if the queue is full, drop and count it."""
        with self._changed:
            if len(self._waiting) >= _MAX_QUEUED:
                self._dropped += 1
                return
            self._waiting.append(point)
            self._changed.notify_all()

    def wait_until_sent(self, until: float) -> None:
        """Wait until everything queued so far is sent, at the latest until `until` (monotonic seconds)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._parameters is None, until - time.monotonic())

    def mark_end(self, status: Status) -> None:
        """Mark the end of the queue; nothing is added later."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def wait_or_give_up(self, until: float) -> None:
        """Wait until everything is sent, at the latest until `until`; then give up and report what was lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._is_given_up, until - time.monotonic())
            lost = self._dropped + len(self._waiting)
            if self._is_done and not lost:
                return
        self._give_up()
        if not self._is_done:
            self._tracker.abandon()
        what = f"{lost} points were not sent" if lost else "it is not known whether it received all of it"
        self._report.message(
            f"The tracker {self.name} was given up before it had everything: {what}. The run's own metrics are "
            "complete: see `metrics.jsonl` in the artifacts.",
            level="warning",
        )

    def _send_points(self) -> None:
        is_connected, pause, tries = False, _FIRST_PAUSE, _FINAL_TRIES
        while not self._is_done and not self._is_given_up:
            with self._changed:
                self._changed.wait_for(self._has_work)
                points = list(islice(self._waiting, _BATCH_SIZE))
                parameters, status = self._parameters, self._status
            try:
                if not is_connected:
                    self._tracker.connect()
                    is_connected = True
                if parameters is not None:
                    self._tracker.describe(parameters)
                if points:
                    self._tracker.log(points)
                elif status is not None:
                    self._tracker.end(status)
                self._mark_sent(parameters, len(points), is_last=not points and status is not None)
                pause = _FIRST_PAUSE
            except Exception as error:
                self._warn_once(error)
                self._pause_before_retry(pause)
                pause = min(pause * 2, _MAX_PAUSE)
                tries -= status is not None
                if tries == 0:
                    self._give_up()

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._parameters is not None or self._status is not None or self._is_given_up

    def _mark_sent(self, parameters: Mapping[str, Any] | None, points: int, is_last: bool) -> None:
        self._report.alive()
        with self._changed:
            for _ in range(points):
                self._waiting.popleft()
            if self._parameters is parameters:
                self._parameters = None
            self._is_done = is_last
            self._changed.notify_all()

    def _give_up(self) -> None:
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def _pause_before_retry(self, seconds: float) -> None:
        """Pause before the next try; shorter at the end of the run, when little time is left."""
        with self._changed:
            if self._status is None:
                self._changed.wait_for(lambda: self._status is not None, seconds)
            else:
                self._changed.wait_for(lambda: self._is_given_up, _FIRST_PAUSE)

    def _warn_once(self, error: Exception) -> None:
        if self._has_warned or self._is_given_up:  # the result may have been reported since, and is the last record
            return
        self._has_warned = True
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._report.message(
            f"The tracker {self.name} cannot be updated for this run ({why}). Training continues, and it is retried.",
            level="warning",
        )


class Trackers:
    """The trackers of one run; without any it does nothing."""

    def __init__(self, queues: Sequence[TrackerQueue] = (), folder: Path | None = None) -> None:
        """Create the trackers; `folder` is where trackers that write files store them."""
        self._queues = queues
        self._folder = folder

    def describe(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Send the effective configuration and the initial run info."""
        for queue in self._queues:
            queue.describe({**config, "facts": dict(facts)})

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Send a metric or an evaluation, in the format of the history."""
        if self._queues:
            point = TrackedPoint.from_record(record, time.time())
            for queue in self._queues:
                queue.add_point(point)

    def add_distributions(self, record: Mapping[str, Any]) -> None:
        """Send histograms, in the format of `distributions.jsonl`."""
        if self._queues:
            point = TrackedPoint.from_distributions(record, time.time())
            for queue in self._queues:
                queue.add_point(point)

    def copy_files(self, target: Path) -> None:
        """Copy the files that trackers have written so far into an output."""
        until = time.monotonic() + _SETTLE_SECONDS
        for queue in self._queues:
            if queue.name == "tensorboard" and self._folder is not None:
                queue.wait_until_sent(until)
                TensorBoard.copy_files(self._folder, target)

    def close(self, status: Status) -> None:
        """End the attempt: send what is left, for a bounded time."""
        for queue in self._queues:
            queue.mark_end(status)
        until = time.monotonic() + _FLUSH_SECONDS[status]
        for queue in self._queues:
            queue.wait_or_give_up(until)


def open_trackers(job: JobSpec, config: TrainingConfig, report: Reporter) -> Trackers:
    """Open the trackers that a run reports to; this thread never sends anything itself.

    Raises:
        TrainingFailure: `config_error` if one cannot be used on this worker.
    """
    names = list(dict.fromkeys(config.report_to))
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise TrainingFailure(
            "config_error",
            f"`report_to` names {', '.join(missing)}, which is not installed on this worker: "
            "run `pip install -c constraints.txt -e '.[trackers]'` in its clone of Anneal, or leave it out.",
        )
    if "mlflow" in names and not job.trackers.mlflow_tracking_uri:
        raise TrainingFailure(
            "config_error",
            "`report_to` names mlflow, but this worker has no MLflow server configured: its operator sets "
            "ANNEAL_MLFLOW_TRACKING_URI.",
        )
    method = str(config.method)
    return Trackers([TrackerQueue(name, _KINDS[name](job, method), report) for name in names], job.attempt_dir)


def status_after(result: TrainingResult) -> Status:
    """Return the status of a run after this result of an attempt; a drained run continues elsewhere."""
    outcome, why = result["outcome"], result.get("why")
    if outcome == "failed":
        return "failed"
    if outcome == "completed" or why in ("time_limit", "stop_at_step"):
        return "completed"
    return "pending" if why == "drain" else "cancelled"


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # A folder of that name, such as wandb creates in its working directory, is not a package.
    return spec is not None and spec.origin is not None

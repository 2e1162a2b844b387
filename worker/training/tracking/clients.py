"""Clients of the experiment trackers: TensorBoard, MLflow, Weights & Biases.

Each tracker is called from its own thread, and calls that raise are retried. Their packages come with the extra
`trackers`, and are imported only if a run uses them.

The callbacks of transformers for these trackers are not used: they connect on the training thread, and of a resumed run
they send points again, rename metrics, and write the paths of this machine.
"""

import json
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from anneal.contracts.attempt.job import JobSpec
from app.infra.files.tree import remove_tree
from worker.training.run_state import DISTRIBUTIONS, METRICS

Status = Literal["completed", "failed", "cancelled", "pending"]
"""Status of a run after an attempt."""

PROJECT = "anneal"
"""Name of the project or experiment of all runs of this service."""
_MAX_PARAMETER_LENGTH = 6000
_CALL_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class TrackedHistogram:
    """Histogram of numbers, without empty bins at both ends."""

    edges: list[float]
    """Edges of the bins, one more than there are bins."""
    counts: list[int]
    count: int
    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def from_record(cls, edges: Sequence[float | None], part: Mapping[str, Any]) -> "TrackedHistogram | None":
        """Create it from a part of a line of `distributions.jsonl`; None if a number was not finite."""
        if any(part[name] is None for name in ("mean", "std", "min", "max")):
            return None
        filled = [index for index, count in enumerate(part["bins"]) if count]
        first, last = filled[0], filled[-1] + 1
        # The outer bins are unbounded; the extremes bound what is in them.
        lower = edges[first]
        upper = edges[last] if last < len(edges) else None
        inner = [edge for edge in edges[first + 1 : last] if edge is not None]
        bounds = [part["min"] if lower is None else lower, *inner, part["max"] if upper is None else upper]
        return cls(bounds, part["bins"][first:last], part["count"], part["mean"], part["std"], part["min"], part["max"])


@dataclass(frozen=True)
class TrackedPoint:
    """Metrics measured after a step."""

    step: int
    at: float
    """Unix seconds."""
    values: dict[str, float]
    """Values by their names in our events; members of `extra` as `extra.<name>`."""
    histograms: dict[str, TrackedHistogram] = field(default_factory=dict)
    """Histograms by the kind of parameter and `weights` or `gradients`; MLflow has none."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], at: float) -> "TrackedPoint":
        """Create a point from a line of the history; values that are not numbers are left out."""
        # An evaluation repeats the epoch of the metric of its step, and a point sent twice is two points.
        left_out = {"step"} if "extra" in record else {"step", "epoch"}
        flat = dict(flatten_values({name: value for name, value in record.items() if name not in left_out}))
        numbers = {name: float(value) for name, value in flat.items() if _is_number(value)}
        return cls(int(record["step"]), at, numbers)

    @classmethod
    def from_distributions(cls, record: Mapping[str, Any], at: float) -> "TrackedPoint":
        """Create a point from a line of `distributions.jsonl`."""
        histograms = {
            f"{group}/{kind}": histogram
            for group, parts in record["groups"].items()
            for kind, part in parts.items()
            if (histogram := TrackedHistogram.from_record(record["edges"], part)) is not None
        }
        return cls(int(record["step"]), at, {}, histograms)


class Tracker(ABC):
    """Client of one experiment tracker for one attempt of a run."""

    def __init__(self, job: JobSpec, method: str) -> None:
        self._job = job
        self._run: dict[str, Any] = {"run_id": job.run_id, "attempt": job.attempt, "method": method}

    @abstractmethod
    def connect(self) -> None:
        """Find or create the run in the tracker; called again if it fails."""

    @abstractmethod
    def describe(self, parameters: Mapping[str, Any]) -> None:
        """Log the parameters of the run."""

    @abstractmethod
    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Log points, in order; called again with the same points if it fails."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """End the run's current attempt; no call follows."""

    def abandon(self) -> None:  # noqa: B027
        """Abort on a timeout, perhaps during a call, so that nothing keeps the process from exiting."""


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the attempt's folder, with a point for each line of its `metrics.jsonl`."""

    FOLDER: ClassVar[str] = "tensorboard"

    def connect(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._job.attempt_dir / self.FOLDER
        remove_tree(folder, ignore_errors=True)  # of a failed try: a reader would merge both
        self._writer = SummaryWriter(log_dir=str(folder))
        # Each attempt has its own folder, so it includes the points before the checkpoint, as `metrics.jsonl` does.
        if resume := self._job.resume_from:
            self.log(list(_read_history(resume.path)))

    def describe(self, parameters: Mapping[str, Any]) -> None:
        text = json.dumps({**self._run, **parameters}, indent=1, default=str)
        self._writer.add_text("parameters", f"```json\n{text}\n```")
        self._writer.flush()

    def log(self, points: Sequence[TrackedPoint]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.at)
            for name, histogram in point.histograms.items():
                self._writer.add_histogram_raw(
                    name, min=histogram.min, max=histogram.max, num=histogram.count,
                    sum=histogram.mean * histogram.count,
                    sum_squares=(histogram.std**2 + histogram.mean**2) * histogram.count,
                    bucket_limits=histogram.edges[1:], bucket_counts=histogram.counts,
                    global_step=point.step, walltime=point.at,
                )  # fmt: skip
        self._writer.flush()

    def end(self, status: Status) -> None:
        self._writer.add_text("status", status)
        self._writer.close()

    @classmethod
    def copy_files(cls, folder: Path, target: Path) -> None:
        """Copy the event files of an attempt's folder into an output."""
        if (folder / cls.FOLDER).is_dir():
            shutil.copytree(folder / cls.FOLDER, target / cls.FOLDER)


class Mlflow(Tracker):
    """A run in the experiment `anneal` of a tracking server, found by its tag in later attempts.

    Points on a server cannot be deleted. A later attempt skips the points that are already there with the same value;
    a step whose values differ has both.
    """

    _STATUS: ClassVar[dict[Status, str]] = {
        "completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "pending": "SCHEDULED",
    }  # fmt: skip

    def __init__(self, job: JobSpec, method: str) -> None:
        super().__init__(job, method)
        self._sent_points: dict[str, set[tuple[int, float]]] = {}

    def connect(self) -> None:
        # By default it retries for minutes, and sends telemetry to its vendor.
        os.environ.update(
            MLFLOW_HTTP_REQUEST_TIMEOUT=str(_CALL_TIMEOUT_SECONDS),
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
            MLFLOW_DISABLE_TELEMETRY="true",
        )
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._job.trackers.mlflow_tracking_uri)
        experiment = self._find_experiment()
        run_filter = f"tags.`anneal.run_id` = '{self._job.run_id}'"
        earlier = self._client.search_runs([experiment], filter_string=run_filter, max_results=1)
        tags = {f"anneal.{name}": str(value) for name, value in {**self._run, "status": "running"}.items()}
        if not earlier:
            created = self._client.create_run(experiment, run_name=self._job.run_id, tags=tags)
            self._id = created.info.run_id
            return
        self._id = earlier[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._set_tags(tags)

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(PROJECT)
        if experiment is None:
            try:
                return str(self._client.create_experiment(PROJECT))
            except Exception:
                # Another run created it concurrently, or our own call was sent twice; otherwise raise.
                experiment = self._client.get_experiment_by_name(PROJECT)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def describe(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        existing = self._client.get_run(self._id).data.params
        sent = {
            _sanitize_name(name): _as_text(value)[:_MAX_PARAMETER_LENGTH] for name, value in flatten_values(parameters)
        }
        new = [Param(name, value) for name, value in sent.items() if name not in existing]
        for batch in _split_batches(new, 100):
            self._client.log_batch(self._id, params=batch)
        # MLflow parameters are immutable: changed values, such as another worker's device, become tags.
        changed = {name: value for name, value in sent.items() if existing.get(name, value) != value}
        self._set_tags({f"anneal.attempt_{self._job.attempt}.{name}": value for name, value in changed.items()})

    def log(self, points: Sequence[TrackedPoint]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_sanitize_name(name), value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
            if not self._was_sent(_sanitize_name(name), point.step, value)
        ]
        for batch in _split_batches(metrics, 1000):
            self._client.log_batch(self._id, metrics=batch)

    def end(self, status: Status) -> None:
        self._set_tags({"anneal.status": status})
        if status == "pending":
            self._client.update_run(self._id, status=self._STATUS[status])
        else:
            self._client.set_terminated(self._id, self._STATUS[status])

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for batch in _split_batches([RunTag(name, value) for name, value in tags.items()], 100):
            self._client.log_batch(self._id, tags=batch)

    def _was_sent(self, key: str, step: int, value: float) -> bool:
        """Return True if an earlier attempt of this run sent this exact point."""
        if self._job.attempt == 1:
            return False
        if key not in self._sent_points:
            first_step = self._job.resume_from.step if self._job.resume_from else 0
            history = self._client.get_metric_history(self._id, key)
            self._sent_points[key] = {(point.step, point.value) for point in history if point.step > first_step}
        return (step, value) in self._sent_points[key]


class Wandb(Tracker):
    """A run of Weights & Biases with our run id, which later attempts continue.

    W&B accepts steps only in increasing order: those sent by an earlier attempt are kept as they are.
    """

    def __init__(self, job: JobSpec, method: str) -> None:
        super().__init__(job, method)
        # Removed from the environment: the W&B service process would inherit it and expose it in /proc.
        self._key = os.environ.pop("WANDB_API_KEY", None)

    def connect(self) -> None:
        config: Mapping[str, Any] = self._job.config
        if self._key is None and self._job.trackers.wandb_mode == "online":
            raise LookupError("no key is set; an admin sets it with `anneal secrets set wandb_api_key`")
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # reports go to the vendor
        import wandb
        from wandb.env import get_project

        self._wandb_run = wandb.init(
            project=config.get("wandb_project") or get_project() or PROJECT,
            entity=config.get("wandb_entity"),
            group=config.get("wandb_group"),
            id=self._job.run_id,
            name=config.get("wandb_name") or self._job.run_id,
            resume="allow",
            tags=[self._run["method"]],
            config=self._run,
            allow_val_change=True,
            dir=str(self._job.attempt_dir),
            settings=wandb.Settings(
                api_key=self._key,
                # Printed lines are in the run's log already, and would not be redacted here.
                console="off", silent=True, save_code=False, disable_git=True, x_disable_meta=True,
                x_disable_stats=True, init_timeout=3 * _CALL_TIMEOUT_SECONDS,
            ),
        )  # fmt: skip

    def describe(self, parameters: Mapping[str, Any]) -> None:
        self._wandb_run.config.update(json.loads(json.dumps(parameters, default=str)), allow_val_change=True)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        import wandb

        for point in points:
            if point.step >= self._wandb_run.step:
                histograms = {
                    name: wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
                    for name, histogram in point.histograms.items()
                }
                self._wandb_run.log({**point.values, **histograms}, step=point.step)

    def end(self, status: Status) -> None:
        self._wandb_run.summary["anneal.status"] = status
        self._wandb_run.finish(exit_code=int(status == "failed"))

    def abandon(self) -> None:
        # W&B retries for minutes, and this process would wait for it. Its data is in `wandb/`, for `wandb sync`.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("wandb"):
                    process.kill()


def flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the members of nested objects by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_history(checkpoint: Path) -> Iterator[TrackedPoint]:
    for name, point in ((METRICS, TrackedPoint.from_record), (DISTRIBUTIONS, TrackedPoint.from_distributions)):
        path = checkpoint / name
        if path.is_file():
            written = path.stat().st_mtime
            with path.open() as lines:
                yield from (point(json.loads(line), written) for line in lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _sanitize_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _split_batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))

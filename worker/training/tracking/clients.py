"""Clients of the experiment trackers: TensorBoard, MLflow, Weights & Biases.

Each tracker is called from its own thread, and calls that raise are retried. Their packages come with the extra
`trackers`, and are imported only if a run uses them.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import psutil

from app.contracts.attempt.job import JobSpec
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
    def of(cls, edges: Sequence[float | None], one: Mapping[str, Any]) -> "TrackedHistogram | None":
        """Create it from a part of a line of `distributions.jsonl`; None if a number was not finite."""
        if any(one[name] is None for name in ("mean", "std", "min", "max")):
            return None
        filled = [at for at, count in enumerate(one["bins"]) if count]
        first, last = filled[0], filled[-1] + 1
        # The outer bins are unbounded; the extremes bound what is in them.
        lower = edges[first]
        upper = edges[last] if last < len(edges) else None
        inner = [edge for edge in edges[first + 1 : last] if edge is not None]
        bounds = [one["min"] if lower is None else lower, *inner, one["max"] if upper is None else upper]
        return cls(bounds, one["bins"][first:last], one["count"], one["mean"], one["std"], one["min"], one["max"])


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
    def of(cls, record: Mapping[str, Any], at: float) -> "TrackedPoint":
        """Create a point from a line of the history; values that are not numbers are left out."""
        # An evaluation repeats the epoch of the metric of its step, and a point sent twice is two points.
        left_out = {"step"} if "extra" in record else {"step", "epoch"}
        flat = dict(flattened({name: value for name, value in record.items() if name not in left_out}))
        numbers = {name: float(value) for name, value in flat.items() if _is_number(value)}
        return cls(int(record["step"]), at, numbers)

    @classmethod
    def of_distributions(cls, record: Mapping[str, Any], at: float) -> "TrackedPoint":
        """Create a point from a line of `distributions.jsonl`."""
        found = {
            f"{group}/{of}": TrackedHistogram.of(record["edges"], one)
            for group, parts in record["groups"].items()
            for of, one in parts.items()
        }
        return cls(int(record["step"]), at, {}, {name: one for name, one in found.items() if one is not None})


@dataclass(frozen=True)
class RunDescription:
    """Description of a run and of its current attempt."""

    run_id: str
    attempt: int
    method: str
    folder: Path
    """Folder of the attempt."""
    checkpoint: Path | None
    """Checkpoint that the attempt resumes from."""
    first_step: int
    """Step of the checkpoint; later points may have been sent by an earlier attempt."""
    mlflow_uri: str
    wandb_mode: str

    @classmethod
    def of(cls, job: JobSpec, method: str) -> "RunDescription":
        """Create a description from the job."""
        resume = job.resume_from
        return cls(
            run_id=job.run_id,
            attempt=job.attempt,
            method=str(method),
            folder=job.attempt_dir,
            checkpoint=resume.path if resume else None,
            first_step=resume.step if resume else 0,
            mlflow_uri=job.trackers.mlflow_tracking_uri or "",
            wandb_mode=job.trackers.wandb_mode,
        )


class Tracker(Protocol):
    """Client of one experiment tracker for one run."""

    def connect(self) -> None:
        """Find or create the run in the tracker; called again if it fails."""

    def describe(self, parameters: Mapping[str, Any]) -> None:
        """Log the parameters of the run."""

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Log points, in order; called again with the same points if it fails."""

    def end(self, status: Status) -> None:
        """End the run's current attempt; no call follows."""

    def abandon(self) -> None:
        """Abort on a timeout, perhaps during a call, so that nothing keeps the process from exiting."""


class TensorBoard:
    """Event files in `tensorboard/` of the attempt's folder, with a point for each line of its `metrics.jsonl`."""

    FOLDER: ClassVar[str] = "tensorboard"

    def __init__(self, about: RunDescription) -> None:
        self._about = about
        self._folder = about.folder / self.FOLDER

    def connect(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(self._folder, ignore_errors=True)  # of a failed try: a reader would merge both
        self._writer = SummaryWriter(log_dir=str(self._folder))
        # Each attempt has its own folder, so it includes the points before the checkpoint, as `metrics.jsonl` does.
        self.log(list(_history(self._about.checkpoint)))

    def describe(self, parameters: Mapping[str, Any]) -> None:
        about = self._about
        described = {"run_id": about.run_id, "attempt": about.attempt, "method": about.method, **parameters}
        self._writer.add_text("parameters", "```json\n" + json.dumps(described, indent=1, default=str) + "\n```")
        self._writer.flush()

    def log(self, points: Sequence[TrackedPoint]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.at)
            for name, one in point.histograms.items():
                self._writer.add_histogram_raw(
                    name,
                    min=one.min,
                    max=one.max,
                    num=one.count,
                    sum=one.mean * one.count,
                    sum_squares=(one.std**2 + one.mean**2) * one.count,
                    bucket_limits=one.edges[1:],
                    bucket_counts=one.counts,
                    global_step=point.step,
                    walltime=point.at,
                )
        self._writer.flush()

    def end(self, status: Status) -> None:
        self._writer.add_text("status", status)
        self._writer.close()

    def abandon(self) -> None: ...

    @classmethod
    def copy_files(cls, folder: Path, target: Path) -> None:
        """Copy the event files of an attempt's folder into an output."""
        if (folder / cls.FOLDER).is_dir():
            shutil.copytree(folder / cls.FOLDER, target / cls.FOLDER)


class Mlflow:
    """A run in the experiment `anneal` of a tracking server, found by its tag in later attempts.

    Points on a server cannot be deleted. A later attempt skips the points that are already there with the same value;
    a step whose values differ has both.
    """

    _STATUS: ClassVar[dict[Status, str]] = {
        "completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "pending": "SCHEDULED",
    }  # fmt: skip

    def __init__(self, about: RunDescription) -> None:
        self._about = about
        self._sent_points: dict[str, set[tuple[int, float]]] = {}

    def connect(self) -> None:
        # By default it retries for minutes, and sends telemetry to its vendor.
        os.environ.update(
            MLFLOW_HTTP_REQUEST_TIMEOUT=str(_CALL_TIMEOUT_SECONDS),
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
            MLFLOW_DISABLE_TELEMETRY="true",
        )
        from mlflow import MlflowClient

        about = self._about
        self._client = MlflowClient(tracking_uri=about.mlflow_uri)
        place = self._experiment()
        named = f"tags.`anneal.run_id` = '{about.run_id}'"
        earlier = self._client.search_runs([place], filter_string=named, max_results=1)
        tags = {"run_id": about.run_id, "attempt": str(about.attempt), "method": about.method, "status": "running"}
        tags = {f"anneal.{name}": value for name, value in tags.items()}
        if not earlier:
            self._id = self._client.create_run(place, run_name=about.run_id, tags=tags).info.run_id
            return
        self._id = earlier[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._tag(tags)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(PROJECT)
        if found is None:
            try:
                return str(self._client.create_experiment(PROJECT))
            except Exception:
                # Another run created it concurrently, or our own call was sent twice; otherwise raise.
                found = self._client.get_experiment_by_name(PROJECT)
                if found is None:
                    raise
        return str(found.experiment_id)

    def describe(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        existing = self._client.get_run(self._id).data.params
        sent = {_sanitized(name): _as_text(value)[:_MAX_PARAMETER_LENGTH] for name, value in flattened(parameters)}
        new = [Param(name, value) for name, value in sent.items() if name not in existing]
        for some in _batches(new, 100):
            self._client.log_batch(self._id, params=some)
        # MLflow parameters are immutable: changed values, such as another worker's device, become tags.
        changed = {name: value for name, value in sent.items() if existing.get(name, value) != value}
        self._tag({f"anneal.attempt_{self._about.attempt}.{name}": value for name, value in changed.items()})

    def log(self, points: Sequence[TrackedPoint]) -> None:
        from mlflow.entities import Metric

        found = [
            Metric(_sanitized(name), value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _batches([one for one in found if not self._has(one.key, one.step, one.value)], 1000):
            self._client.log_batch(self._id, metrics=some)

    def end(self, status: Status) -> None:
        self._tag({"anneal.status": status})
        if status == "pending":
            self._client.update_run(self._id, status=self._STATUS[status])
        else:
            self._client.set_terminated(self._id, self._STATUS[status])

    def abandon(self) -> None: ...

    def _tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for some in _batches([RunTag(name, value) for name, value in tags.items()], 100):
            self._client.log_batch(self._id, tags=some)

    def _has(self, key: str, step: int, value: float) -> bool:
        """Return True if an earlier attempt of this run sent this exact point."""
        if self._about.attempt == 1:
            return False
        if key not in self._sent_points:
            history = self._client.get_metric_history(self._id, key)
            self._sent_points[key] = {(one.step, one.value) for one in history if one.step > self._about.first_step}
        return (step, value) in self._sent_points[key]


class Wandb:
    """A run of Weights & Biases with our run id, which later attempts continue.

    W&B accepts steps only in increasing order: those sent by an earlier attempt are kept as they are.
    """

    def __init__(self, about: RunDescription) -> None:
        self._about = about
        # Removed from the environment: the W&B service process would inherit it and expose it in /proc.
        self._key = os.environ.pop("WANDB_API_KEY", None)

    def connect(self) -> None:
        if self._key is None and self._about.wandb_mode == "online":
            raise LookupError("no key is set; an admin sets it with `anneal secrets set wandb_api_key`")
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # reports go to the vendor
        import wandb
        from wandb.env import get_project

        about = self._about
        self._run = wandb.init(
            project=get_project() or PROJECT,
            id=about.run_id,
            name=about.run_id,
            resume="allow",
            tags=[about.method],
            config={"run_id": about.run_id, "attempt": about.attempt, "method": about.method},
            allow_val_change=True,
            dir=str(about.folder),
            settings=wandb.Settings(
                api_key=self._key,
                # Printed lines are in the run's log already, and would not be redacted here.
                console="off", silent=True, save_code=False, disable_git=True, x_disable_meta=True,
                x_disable_stats=True, init_timeout=3 * _CALL_TIMEOUT_SECONDS,
            ),
        )  # fmt: skip

    def describe(self, parameters: Mapping[str, Any]) -> None:
        self._run.config.update(json.loads(json.dumps(parameters, default=str)), allow_val_change=True)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        import wandb

        for point in points:
            if point.step >= self._run.step:
                histograms = {
                    name: wandb.Histogram(np_histogram=(one.counts, one.edges))
                    for name, one in point.histograms.items()
                }
                self._run.log({**point.values, **histograms}, step=point.step)

    def end(self, status: Status) -> None:
        self._run.summary["anneal.status"] = status
        self._run.finish(exit_code=int(status == "failed"))

    def abandon(self) -> None:
        # W&B retries for minutes, and this process would wait for it. Its data is in `wandb/`, for `wandb sync`.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("wandb"):
                    process.kill()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the members of nested objects by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _history(checkpoint: Path | None) -> Iterable[TrackedPoint]:
    if checkpoint is None:
        return
    for name, point in ((METRICS, TrackedPoint.of), (DISTRIBUTIONS, TrackedPoint.of_distributions)):
        path = checkpoint / name
        if path.is_file():
            written = path.stat().st_mtime
            with path.open() as lines:
                yield from (point(json.loads(line), written) for line in lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _sanitized(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _batches(things: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (things[begin : begin + most] for begin in range(0, len(things), most))

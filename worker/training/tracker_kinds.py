"""What each experiment tracker is told, and how: TensorBoard, MLflow, Weights & Biases.

All of it is called from one thread for each tracker; whatever it raises is tried again. Their packages come with the
extra `trackers`, and are imported only where a run asks for them.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import psutil

from worker.training.state import METRICS

Status = Literal["completed", "failed", "cancelled", "pending"]
"""How an attempt leaves its run."""

PROJECT = "anneal"
"""What trackers call all runs of this service together."""
_LONGEST_PARAMETER = 6000
_SECONDS_OF_A_CALL = 10


@dataclass(frozen=True)
class Point:
    """What was measured after a step."""

    step: int
    at: float
    """Unix seconds."""
    values: dict[str, float]
    """By the names of our events; members of `extra` as `extra.<name>`."""

    @classmethod
    def of(cls, record: Mapping[str, Any], at: float) -> "Point":
        """From a line of the history; what is no number is left out."""
        # An evaluation repeats the epoch of the metric beside it, and a point told twice is two points.
        left_out = {"step"} if "extra" in record else {"step", "epoch"}
        flat = dict(flattened({name: value for name, value in record.items() if name not in left_out}))
        numbers = {name: float(value) for name, value in flat.items() if _is_number(value)}
        return cls(int(record["step"]), at, numbers)


@dataclass(frozen=True)
class About:
    """Which run this is, and where it stands."""

    run_id: str
    attempt: int
    method: str
    folder: Path
    """The attempt's own."""
    checkpoint: Path | None
    """Where it goes on from."""
    first_step: int
    """Of the checkpoint; points behind it may have been told by an earlier attempt."""
    mlflow_uri: str

    @classmethod
    def of(cls, job: Mapping[str, Any], method: str, mlflow_uri: str | None) -> "About":
        """From the job file."""
        resume = job.get("resume_from")
        return cls(
            run_id=str(job["run_id"]),
            attempt=int(job["attempt"]),
            method=str(method),
            folder=Path(job["output_dir"]),
            checkpoint=Path(resume["path"]) if resume else None,
            first_step=int(resume["step"]) if resume else 0,
            mlflow_uri=mlflow_uri or "",
        )


class Tracker(Protocol):
    """One place that a run is told to."""

    def connect(self) -> None:
        """Find or make the run there; called again after it failed."""

    def describe(self, parameters: Mapping[str, Any]) -> None:
        """What the run is made of."""

    def log(self, points: Sequence[Point]) -> None:
        """Measurements, in order; called again with the same ones after it failed."""

    def end(self, status: Status) -> None:
        """Nothing more will come from this attempt."""

    def abandon(self) -> None:
        """Time is up, perhaps in the middle of a call: see that nothing of it keeps the process from ending."""


class TensorBoard:
    """Event files in `tensorboard/` of the attempt's folder: a point for each line of its `metrics.jsonl`."""

    FOLDER: ClassVar[str] = "tensorboard"

    def __init__(self, about: About) -> None:
        self._about = about
        self._folder = about.folder / self.FOLDER

    def connect(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(self._folder, ignore_errors=True)  # of a try that failed: a reader would add the two up
        self._writer = SummaryWriter(log_dir=str(self._folder))
        # A folder for each attempt, and so the points before the checkpoint are part of it as of `metrics.jsonl`.
        self.log(list(_history(self._about.checkpoint)))

    def describe(self, parameters: Mapping[str, Any]) -> None:
        about = self._about
        told = {"run_id": about.run_id, "attempt": about.attempt, "method": about.method, **parameters}
        self._writer.add_text("parameters", "```json\n" + json.dumps(told, indent=1, default=str) + "\n```")
        self._writer.flush()

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.at)
        self._writer.flush()

    def end(self, status: Status) -> None:
        self._writer.add_text("status", status)
        self._writer.close()

    def abandon(self) -> None: ...

    @classmethod
    def copy_files(cls, folder: Path, target: Path) -> None:
        """Put the event files of an attempt's folder into an output."""
        if (folder / cls.FOLDER).is_dir():
            shutil.copytree(folder / cls.FOLDER, target / cls.FOLDER)


class Mlflow:
    """A run in the experiment `anneal` of a tracking server, found again by its tag in later attempts.

    What a server has cannot be taken back: a later attempt leaves out the points that are there already, exactly as
    they are, and a step whose values came out differently has both.
    """

    _STATUS: ClassVar[dict[Status, str]] = {
        "completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "pending": "SCHEDULED",
    }  # fmt: skip

    def __init__(self, about: About) -> None:
        self._about = about
        self._there: dict[str, set[tuple[int, float]]] = {}

    def connect(self) -> None:
        # Its own patience is minutes; and it would tell its makers that it is used.
        os.environ.update(
            MLFLOW_HTTP_REQUEST_TIMEOUT=str(_SECONDS_OF_A_CALL),
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
                # Another run has made it in this moment, or our own call came twice; else this is the trouble.
                found = self._client.get_experiment_by_name(PROJECT)
                if found is None:
                    raise
        return str(found.experiment_id)

    def describe(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self._id).data.params
        told = {_allowed(name): _as_text(value)[:_LONGEST_PARAMETER] for name, value in flattened(parameters)}
        new = [Param(name, value) for name, value in told.items() if name not in there]
        for some in _parts(new, 100):
            self._client.log_batch(self._id, params=some)
        # Parameters cannot change there: another worker's device, say, is told as what it is.
        changed = {name: value for name, value in told.items() if there.get(name, value) != value}
        self._tag({f"anneal.attempt_{self._about.attempt}.{name}": value for name, value in changed.items()})

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        found = [
            Metric(_allowed(name), value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _parts([one for one in found if not self._has(one.key, one.step, one.value)], 1000):
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

        for some in _parts([RunTag(name, value) for name, value in tags.items()], 100):
            self._client.log_batch(self._id, tags=some)

    def _has(self, key: str, step: int, value: float) -> bool:
        """Whether an earlier attempt of this run told this very point."""
        if self._about.attempt == 1:
            return False
        if key not in self._there:
            told = self._client.get_metric_history(self._id, key)
            self._there[key] = {(one.step, one.value) for one in told if one.step > self._about.first_step}
        return (step, value) in self._there[key]


class Wandb:
    """A run of Weights & Biases whose id is ours, which a later attempt goes on with.

    It takes steps in rising order alone: those that it has from an earlier attempt stay as they are there.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        # Taken out of the environment, which its own service process would inherit, for the kernel to show.
        self._key = os.environ.pop("WANDB_API_KEY", None)

    def connect(self) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # to its makers
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
                # Printed lines are in the run's log already, and go through no redaction on this way.
                console="off", silent=True, save_code=False, disable_git=True, x_disable_meta=True,
                x_disable_stats=True, init_timeout=3 * _SECONDS_OF_A_CALL,
            ),
        )  # fmt: skip

    def describe(self, parameters: Mapping[str, Any]) -> None:
        self._run.config.update(json.loads(json.dumps(parameters, default=str)), allow_val_change=True)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step >= self._run.step:
                self._run.log(point.values, step=point.step)

    def end(self, status: Status) -> None:
        self._run.summary["anneal.status"] = status
        self._run.finish(exit_code=int(status == "failed"))

    def abandon(self) -> None:
        # It tries on for minutes, and this process would wait for it. What it has is in `wandb/`, for `wandb sync`.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("wandb"):
                    process.kill()


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Members of nested objects by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _history(checkpoint: Path | None) -> Iterable[Point]:
    if checkpoint is None:
        return
    with (checkpoint / METRICS).open() as lines:
        written = (checkpoint / METRICS).stat().st_mtime
        for line in lines:
            yield Point.of(json.loads(line), written)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _parts(things: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (things[begin : begin + most] for begin in range(0, len(things), most))

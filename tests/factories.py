"""Things that tests of runs need, made with the statements of the product."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine, insert, select, update

from app.checkpoints.models import Checkpoint
from app.config import Settings
from app.datasets.models import Dataset
from app.events.log import NewEvent, append
from app.experiments.models import Experiment
from app.ids import new_id
from app.runs import lifecycle
from app.runs.models import Run
from app.runs.rollups import Rollups
from app.storage import Storage
from tests.rows import add_worker
from tests.waiting import eventually


def make_experiment(engine: Engine, name: str = "an experiment") -> str:
    """An experiment; answers its id."""
    experiment_id = new_id("exp")
    with engine.begin() as connection:
        connection.execute(insert(Experiment).values(id=experiment_id, name=name))
    return experiment_id


def make_dataset(engine: Engine, format: str = "chat", columns: Sequence[str] = ("messages",)) -> str:
    """A data set without files; answers its id."""
    dataset_id = new_id("ds")
    row = {"format": format, "extension": "jsonl", "rows": 8, "bytes": 800, "sha256": "0" * 64}
    with engine.begin() as connection:
        connection.execute(
            insert(Dataset).values(id=dataset_id, name=f"{format}.jsonl", columns=[*columns], preview=[], **row)
        )
    return dataset_id


def make_run(client: httpx.Client, dataset_id: str, **body: Any) -> dict[str, Any]:
    """A run that the API has accepted; of the fake backend unless told otherwise."""
    config = {"base_model": "any", **body.pop("config", {})}
    answer = client.post("/v1/runs", json={"backend": "fake", "dataset_id": dataset_id, "config": config, **body})
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


def make_model(settings: Settings, name: str = "tiny", file: str = "config.json") -> Path:
    """A folder below the models root that looks like a model."""
    folder = settings.models_folder / name
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class Trainer:
    """Plays the worker of one run through the product's own statements."""

    def __init__(self, engine: Engine, run_id: str, rolls_up: bool = True) -> None:
        """Claim the run, which must be the only one that waits; workers of the first version rolled nothing up."""
        self.engine = engine
        self.run_id = run_id
        self.worker_id = add_worker(engine, backends=["celery", "fake"])
        # A dispatcher that marks the run at this moment makes the claim pass over it, once.
        claimed = eventually(self._claim)
        assert claimed["id"] == run_id
        self.epoch, self.attempt = claimed["epoch"], claimed["attempt"]
        self._sent = 0
        self.rolls_up = rolls_up
        self._rollups = Rollups(run_id, self.attempt)

    def _claim(self) -> Any:
        with self.engine.begin() as connection:
            claim = lifecycle.claim(self.worker_id, ["celery", "fake"], 600.0, "cuda", 100_000)
            return connection.execute(claim).mappings().one_or_none()

    def begin(self, step: int = 0, total: int | None = 100) -> "Trainer":
        """Start to train."""
        return self._do(lifecycle.begin(self.run_id, self.epoch, step, 0.0, total, None))

    def events(self, kind: str, *payloads: dict[str, Any]) -> None:
        """Append events of one type."""
        self.mixed([(kind, payload) for payload in payloads])

    def mixed(self, batch: list[tuple[str, dict[str, Any]]]) -> None:
        """Append events of any types together."""
        self.store([NewEvent.of(kind, datetime.now(UTC).timestamp(), payload) for kind, payload in batch])

    def store(self, new: list[NewEvent]) -> None:
        """Append as a worker does."""
        with self.engine.begin() as connection:
            stored = append(connection, self.run_id, self.epoch, self._sent + 1, new)
            if self.rolls_up:
                self._rollups.store(connection, self._sent + 1, new, stored)
        self._rollups.committed()
        self._sent += len(new)

    def log(self, *lines: str) -> None:
        """Print."""
        self.events("log", *({"line": line, "stream": "stdout", "level": "info"} for line in lines))

    def metric(self, step: int, **values: Any) -> None:
        """Tell a point of the curves."""
        self.events("metric", {"step": step, "epoch": step / 100, **values})

    def checkpoint(self, step: int, kind: str = "periodic", **values: Any) -> str:
        """Commit a checkpoint row; answers its id."""
        checkpoint_id = new_id("ckpt")
        row = {"epoch": step / 100, "bytes": 10, "manifest_sha256": "a" * 64, "metrics": {"loss": 1.5}, **values}
        with self.engine.begin() as connection:
            connection.execute(
                insert(Checkpoint).values(
                    id=checkpoint_id, run_id=self.run_id, attempt=self.attempt, name=f"checkpoint-{step}", step=step,
                    kind=kind, **row,
                )
            )  # fmt: skip
        return checkpoint_id

    def complete(self) -> "Trainer":
        """Finish with an output."""
        return self._do(lifecycle.complete(self.run_id, self.epoch, self.attempt, "all steps done"))

    def fail(self, code: str = "internal", message: str = "it broke") -> "Trainer":
        """Fail for a reason of the run's own."""
        return self._do(lifecycle.fail(self.run_id, self.epoch, code, message))

    def cancel_on_request(self) -> "Trainer":
        """End because somebody has asked for it, with what it has so far as its output."""
        with self.engine.begin() as connection:
            connection.execute(lifecycle.request_stop(self.run_id, True))
            connection.execute(update(Run).where(Run.id == self.run_id).values(output_attempt=self.attempt))
        return self.cancel()

    def cancel(self) -> "Trainer":
        """End as asked."""
        return self._do(lifecycle.cancel(self.run_id, self.epoch))

    def retry(self) -> "Trainer":
        """Give the run back, to be claimed again; answers the trainer of the next attempt."""
        self._do(lifecycle.retry(self.run_id, self.epoch, "lost", 0.0))
        return Trainer(self.engine, self.run_id, self.rolls_up)

    def write_output(self, storage: Storage) -> Path:
        """The files that a completed run leaves."""
        folder = storage.output_dir(self.run_id, self.attempt)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        return folder

    def _do(self, statement: Any) -> "Trainer":
        with self.engine.begin() as connection:
            connection.execute(statement).mappings().one()
        return self


def mark_checkpoint(engine: Engine, checkpoint_id: str, **values: Any) -> None:
    """What retention or verification writes on a checkpoint."""
    with engine.begin() as connection:
        connection.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**values))


def mark_run(engine: Engine, run_id: str, **values: Any) -> None:
    """Columns of a run that no test's business depends on how they came about."""
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == run_id).values(**values))


def count_runs(engine: Engine) -> int:
    """How many runs there are."""
    with engine.connect() as connection:
        return len(connection.execute(select(Run.id)).all())

"""Factories for tests of runs, built on the product's own SQL statements."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine, insert, select, update

from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.events.log import NewEvent, append_events
from app.runs.queue.claim import claim_run
from app.runs.reading.metrics.rollups import Rollups
from app.runs.state import machine
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.tables.runs import Run
from tests.rows import add_worker, run_row
from tests.waiting import eventually


def make_experiment(engine: Engine, name: str = "an experiment") -> str:
    """Create an experiment and return its id."""
    experiment_id = new_id("exp")
    with engine.begin() as connection:
        connection.execute(insert(Experiment).values(id=experiment_id, name=name))
    return experiment_id


def make_dataset(engine: Engine, format: str = "chat", columns: Sequence[str] = ("messages",)) -> str:
    """Create a dataset without files and return its id."""
    dataset_id = new_id("ds")
    source = {"file_format": "jsonl", "delimiter": None, "gzip": False, "layout": None}
    row = {"format": format, "source": source, "extension": "jsonl", "rows": 8, "bytes": 800, "sha256": "0" * 64}
    with engine.begin() as connection:
        connection.execute(
            insert(Dataset).values(id=dataset_id, name=f"{format}.jsonl", columns=[*columns], preview=[], **row)
        )
    return dataset_id


def make_run(client: httpx.Client, dataset_id: str, **body: Any) -> dict[str, Any]:
    """Create a run through the API; uses the fake backend by default."""
    config = {"base_model": "any", **body.pop("config", {})}
    answer = client.post("/v1/runs", json={"backend": "fake", "dataset_id": dataset_id, "config": config, **body})
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


def make_model(settings: Settings, name: str = "tiny", file: str = "config.json") -> Path:
    """Create a folder below the models root that looks like a model."""
    folder = settings.models_folder / name
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class Trainer:
    """Acts as the worker of one run through the product's own statements."""

    def __init__(self, engine: Engine, run_id: str, rolls_up: bool = True, devices: int = 1) -> None:
        """Claim the run, which must be the only pending one; `rolls_up=False` acts as a worker of the first version."""
        self.engine = engine
        self.run_id = run_id
        backends, kind = ["celery", "fake", "ray"], run_row(engine, run_id).requirements.get("kind") or "cpu"
        self.worker_id = add_worker(engine, kind=kind, memory_mb=[100_000] * devices, backends=backends)
        # If a dispatcher locks the run at this moment, the claim skips it once.
        claimed = eventually(self._claim)
        assert claimed["id"] == run_id
        self.lease_epoch, self.attempt = claimed["lease_epoch"], claimed["attempt"]
        self._sent = 0
        self.rolls_up = rolls_up
        self._rollups = Rollups(run_id, self.attempt)

    def _claim(self) -> Any:
        with self.engine.begin() as connection:
            row = claim_run(connection, self.worker_id, 600.0)
        return None if row is None else row._mapping

    def begin(self, step: int = 0, total: int | None = 100) -> "Trainer":
        """Start training."""
        return self._do(machine.begin(self.run_id, self.lease_epoch, step, 0.0, total, None))

    def events(self, kind: str, *payloads: dict[str, Any]) -> None:
        """Append events of one type."""
        self.mixed([(kind, payload) for payload in payloads])

    def mixed(self, batch: list[tuple[str, dict[str, Any]]]) -> None:
        """Append events of several types in one batch."""
        self.store([NewEvent.from_payload(kind, datetime.now(UTC).timestamp(), payload) for kind, payload in batch])

    def store(self, new: list[NewEvent]) -> None:
        """Append events as a worker does."""
        with self.engine.begin() as connection:
            stored = append_events(connection, self.run_id, self.lease_epoch, self._sent + 1, new)
            if self.rolls_up:
                self._rollups.store_changes(connection, self._sent + 1, new, stored)
        self._rollups.note_commit()
        self._sent += len(new)

    def log(self, *lines: str) -> None:
        """Append log lines."""
        self.events("log", *({"line": line, "stream": "stdout", "level": "info"} for line in lines))

    def metric(self, step: int, **values: Any) -> None:
        """Append a metric event."""
        self.events("metric", {"step": step, "epoch": step / 100, **values})

    def checkpoint(self, step: int, kind: str = "periodic", **values: Any) -> str:
        """Insert a checkpoint row and return its id."""
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
        """Complete the run with an output."""
        return self._do(machine.complete(self.run_id, self.lease_epoch, self.attempt, "all steps done"))

    def fail(self, code: str = "internal", message: str = "it broke") -> "Trainer":
        """Fail the run with an error code."""
        return self._do(machine.fail(self.run_id, self.lease_epoch, code, message))

    def cancel_on_request(self) -> "Trainer":
        """Cancel the run after a stop request, with the current attempt's output."""
        with self.engine.begin() as connection:
            connection.execute(machine.request_stop(self.run_id, "checkpoint"))
            connection.execute(update(Run).where(Run.id == self.run_id).values(output_attempt=self.attempt))
        return self.cancel()

    def cancel(self) -> "Trainer":
        """Cancel the run."""
        return self._do(machine.cancel(self.run_id, self.lease_epoch))

    def retry(self) -> "Trainer":
        """Requeue the run and claim it again; return the trainer of the next attempt."""
        self._do(machine.retry(self.run_id, self.lease_epoch, "lost", 0.0))
        return Trainer(self.engine, self.run_id, self.rolls_up)

    def write_output(self, storage: Storage) -> Path:
        """Write the output files of a completed run and return their folder."""
        folder = storage.output_dir(self.run_id, self.attempt)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        return folder

    def _do(self, statement: Any) -> "Trainer":
        with self.engine.begin() as connection:
            connection.execute(statement).mappings().one()
        return self


def mark_checkpoint(engine: Engine, checkpoint_id: str, **values: Any) -> None:
    """Update columns of a checkpoint, as retention or verification would."""
    with engine.begin() as connection:
        connection.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(**values))


def mark_run(engine: Engine, run_id: str, **values: Any) -> None:
    """Update columns of a run directly, where the test does not depend on how they were set."""
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == run_id).values(**values))


def count_runs(engine: Engine) -> int:
    """Return the number of runs."""
    with engine.connect() as connection:
        return len(connection.execute(select(Run.id)).all())

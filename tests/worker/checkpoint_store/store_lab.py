"""A worker with a working copy of an object store."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from app.config import Settings
from app.infra.files.object_store import MARK
from app.tables.administration.installation import Installation, register_installation
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import WAITS, Lab
from worker.attempts.job_builder import Job
from worker.checkpoint_store.remote_store import RemoteStore
from worker.checkpoint_store.restore import RestoreControl
from worker.checkpoint_store.uploader import CheckpointUploader
from worker.checkpoint_store.working_copy import WorkingCopy


def claim(remote: RemoteStore, engine: Engine) -> None:
    """Mark the store, as the API does when it starts."""
    with engine.begin() as connection:
        connection.execute(register_installation())
        remote.objects.claim_for(connection.execute(select(Installation.id)).scalar_one(), lambda: True)


def attach_store(context: Any, share: Path) -> RemoteStore:
    """Give a worker a working copy of the share."""
    remote = RemoteStore(f"file://{share}", context.storage)
    claim(remote, context.engine)
    context.working_copy = WorkingCopy(remote, context.storage, context.engine, 10**9, 0)
    context.uploader = CheckpointUploader(remote, context.storage, context.engine)
    return remote


def stored_files(share: Path) -> list[str]:
    """Return the names of the files of runs in the store."""
    return sorted(path.name for path in (share / "runs").rglob("*") if path.is_file())


class StoreLab(Lab):
    """A run whose dataset is in the store, and the worker of its next attempt."""

    def __init__(self, settings: Settings, engine: Engine, share: Path) -> None:
        super().__init__(settings, engine)
        self.context.settings = Settings(**{**settings.model_dump(), "storage": f"file://{share}"})
        self.remote = attach_store(self.context, share)
        self.uploader: CheckpointUploader = self.context.uploader
        (dataset,) = self.storage.root.glob("datasets/*/data.jsonl")
        content = dataset.read_bytes()
        with engine.begin() as connection:
            values = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            connection.execute(update(Dataset).where(Dataset.id == dataset.parent.name).values(**values))
        self.remote.objects.put(self.storage.key_of(dataset), iter([content]))

    def save_queued(self, step: int) -> Path:
        """Save a checkpoint and notify the uploader."""
        folder = self.save(step)
        (row,) = [row for row in self.rows() if row.step == step]
        self.uploader.queue_checkpoint(row)
        return folder

    def rows(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(Checkpoint.__table__).order_by(Checkpoint.step)).all())

    def wait_until_sent(self, count: int) -> None:
        eventually(lambda: sum(row.replicated_at is not None for row in self.rows()) == count)

    def move(self, path: Path) -> None:
        """Have the next attempt on a machine that has nothing of this run."""
        (self.storage.root / "runs").rename(path)

    def next_attempt(self, restore_control: RestoreControl = WAITS) -> tuple[Job, dict[str, Any]]:
        with self.context.working_copy.used_by(self.trainer.run_id):
            return super().next_attempt(restore_control)


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / MARK).touch()
    return tmp_path / "shared"


@pytest.fixture
def lab(settings: Settings, engine: Engine, share: Path) -> Iterator[StoreLab]:
    lab = StoreLab(settings, engine, share)
    yield lab
    lab.uploader.close()

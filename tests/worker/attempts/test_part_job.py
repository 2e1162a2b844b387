"""The job of a part on a worker that shares no folder with the lead: the same, with files of its own."""

import hashlib
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from app.config import Settings
from app.contracts.attempt.job import JobSpec
from app.infra.files.object_store import MARK
from app.infra.storage import Storage
from app.tables.datasets import Dataset
from app.tables.installation import Installation, register
from tests.factories import mark_checkpoint
from tests.rows import run_row
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import WAITS, Context, Lab
from worker.attempts.job_builder import JobError
from worker.attempts.part_job import prepare_part
from worker.checkpoint_files import manifest
from worker.checkpoint_store.remote_store import RemoteStore
from worker.checkpoint_store.replicator import Replicator
from worker.checkpoint_store.working_copy import WorkingCopy


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / MARK).touch()
    return tmp_path / "share"


def on_store(context: Any, share: Path) -> None:
    """Let the worker have a working copy of the share."""
    remote = RemoteStore(f"file://{share}", context.storage)
    with context.engine.begin() as connection:
        connection.execute(register())
        installation = connection.scalar(select(Installation.id))
    assert installation is not None
    remote.objects.claim(installation, lambda: True)
    context.working_copy = WorkingCopy(remote, context.storage, context.engine, 10**9, 0)
    context.replicator = Replicator(remote, context.storage, context.engine)


@pytest.fixture
def lead(settings: Settings, engine: Engine, share: Path) -> Lab:
    """The worker of the lead, whose data set is in the store; its checkpoint is not sent yet."""
    lab = Lab(settings, engine)
    on_store(lab.context, share)
    (dataset,) = lab.storage.root.glob("datasets/*/data.jsonl")
    content = dataset.read_bytes()
    with engine.begin() as connection:
        values = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        connection.execute(update(Dataset).where(Dataset.id == dataset.parent.name).values(**values))
    lab.context.working_copy._remote.objects.put(lab.storage.key_of(dataset), iter([content]))
    return lab


@pytest.fixture
def member(settings: Settings, engine: Engine, share: Path, tmp_path: Path) -> Any:
    """Another worker, with a home of its own."""
    changed = Settings(**{**settings.model_dump(), "home": tmp_path / "other", "storage": f"file://{share}"})
    context: Any = Context(changed, engine)
    context.storage = Storage(changed)
    on_store(context, share)
    return context


def send(lead: Lab, engine: Engine, folder: Path, step: int) -> None:
    """Send a checkpoint to the store, as the replicator of the lead does."""
    sha256 = hashlib.sha256((folder / manifest.MANIFEST).read_bytes()).hexdigest()
    lead.context.working_copy._remote.send(folder, sha256, lambda: None)
    now = datetime.now(UTC)
    mark_checkpoint(engine, lead.ids[step], replicated_at=now, replica_started_at=now)


def test_it_has_the_same_files_below_its_own_root_and_waits_for_a_checkpoint_that_is_still_to_be_sent(
    lead: Lab, member: Any, engine: Engine
) -> None:
    folder = lead.save(10)
    with lead.context.working_copy.used_by(lead.trainer.run_id):
        job, _ = lead.next_attempt()
    given, run = JobSpec.read(job.path), run_row(engine, lead.trainer.run_id)
    assert not given.shares_folder and given.resume_from is not None
    found: list[JobSpec] = []

    def prepare() -> None:
        with member.working_copy.used_by(run.id):
            found.append(JobSpec.read(prepare_part(member, run, given, WAITS)))

    thread = threading.Thread(target=prepare)
    thread.start()
    eventually(lambda: list(member.storage.root.glob("datasets/*/data.jsonl")), what="the dataset is fetched")
    thread.join(0.6)
    assert thread.is_alive(), "the checkpoint is not in the store yet"
    send(lead, engine, folder, 10)
    thread.join(30)
    (own,) = found
    root = member.storage.root
    assert own.resume_from is not None and own.resume_from.path == root / folder.relative_to(lead.storage.root)
    assert manifest.verify(own.resume_from.path, own.resume_from.manifest_sha256) == []
    for path in (own.dataset.path, own.attempt_dir, own.journal, own.token_cache.folder if own.token_cache else root):
        assert path.is_relative_to(root)
    files = {"dataset", "attempt_dir", "journal", "token_cache", "resume_from"}
    assert own.model_dump(exclude=files) == given.model_dump(exclude=files)


def test_a_checkpoint_that_cannot_be_fetched_ends_the_part(lead: Lab, member: Any, engine: Engine, share: Path) -> None:
    send(lead, engine, lead.save(10), 10)
    with lead.context.working_copy.used_by(lead.trainer.run_id):
        job, _ = lead.next_attempt()
    shutil.rmtree(share / "runs")
    run = run_row(engine, lead.trainer.run_id)
    with member.working_copy.used_by(run.id), pytest.raises(JobError) as refused:
        prepare_part(member, run, JobSpec.read(job.path), WAITS)
    assert (refused.value.code, refused.value.is_transient) == ("storage_unavailable", True)

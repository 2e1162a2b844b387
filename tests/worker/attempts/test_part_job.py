"""The job of a part on a worker that shares no folder with the lead: the same, with files of its own."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.rewards import RewardHost
from app.config import Settings
from app.infra.storage import Storage
from tests.rows import run_row
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import WAITS, Context
from tests.worker.checkpoint_store.store_lab import StoreLab, attach_store, share  # noqa: F401
from worker.attempts.job_error import JobError
from worker.attempts.part_job import prepare_part
from worker.checkpoint_files import manifest

# ruff: noqa: F811


@pytest.fixture
def lead(settings: Settings, engine: Engine, share: Path) -> StoreLab:
    """The worker of the lead, whose checkpoint is not sent yet."""
    return StoreLab(settings, engine, share)


@pytest.fixture
def member(settings: Settings, engine: Engine, share: Path, tmp_path: Path) -> Any:
    """Another worker, with a home of its own."""
    changed = Settings(**{**settings.model_dump(), "home": tmp_path / "other", "storage": f"file://{share}"})
    context: Any = Context(changed, engine)
    context.storage = Storage(changed)
    attach_store(context, share)
    return context


def test_it_has_the_same_files_below_its_own_root_and_waits_for_a_checkpoint_that_is_still_to_be_sent(
    lead: StoreLab, member: Any, engine: Engine
) -> None:
    folder = lead.save(10)
    job, _ = lead.next_attempt()
    lead_job, run = JobSpec.from_file(job.path), run_row(engine, lead.trainer.run_id)
    assert not lead_job.shares_folder and lead_job.resume_from is not None
    part_jobs: list[JobSpec] = []

    def prepare() -> None:
        with member.working_copy.used_by(run.id):
            part_jobs.append(JobSpec.from_file(prepare_part(member, run, lead_job, WAITS)))

    thread = threading.Thread(target=prepare)
    thread.start()
    eventually(lambda: list(member.storage.root.glob("datasets/*/data.jsonl")), what="the dataset is fetched")
    thread.join(0.6)
    assert thread.is_alive(), "the checkpoint is not in the store yet"
    assert lead.uploader._send_checkpoint(lead.rows()[0])
    thread.join(120)
    (own,) = part_jobs
    root = member.storage.root
    assert own.resume_from is not None and own.resume_from.path == root / folder.relative_to(lead.storage.root)
    assert manifest.verify(own.resume_from.path, own.resume_from.manifest_sha256) == []
    for path in (own.dataset.path, own.attempt_dir, own.journal, own.token_cache.folder if own.token_cache else root):
        assert path.is_relative_to(root)
    files = {"dataset", "attempt_dir", "journal", "token_cache", "resume_from"}
    assert own.model_dump(exclude=files) == lead_job.model_dump(exclude=files)


def test_a_part_holds_rewards_against_the_hosts_of_its_own_worker(lead: StoreLab, member: Any, engine: Engine) -> None:
    job, _ = lead.next_attempt()
    reward = {"type": "http", "url": "https://judge.example.com:8443/v1"}
    allowed = RewardHost(name="judge.example.com", port=8443, secret="judge_key")
    changed = {"config": {"method": "rlhf", "rlhf": {"rewards": [reward]}}, "reward_hosts": [allowed]}
    lead_job, run = JobSpec.from_file(job.path).model_copy(update=changed), run_row(engine, lead.trainer.run_id)
    with member.working_copy.used_by(run.id), pytest.raises(JobError, match="ANNEAL_REWARD_HOSTS") as refused:
        prepare_part(member, run, lead_job, WAITS)
    assert (refused.value.code, refused.value.is_transient) == ("config_error", False)


def test_a_checkpoint_that_cannot_be_fetched_ends_the_part(
    lead: StoreLab, member: Any, engine: Engine, share: Path
) -> None:
    lead.save(10)
    assert lead.uploader._send_checkpoint(lead.rows()[0])
    job, _ = lead.next_attempt()
    shutil.rmtree(share / "runs")
    run = run_row(engine, lead.trainer.run_id)
    with member.working_copy.used_by(run.id), pytest.raises(JobError) as refused:
        prepare_part(member, run, JobSpec.from_file(job.path), WAITS)
    assert (refused.value.code, refused.value.is_transient) == ("storage_unavailable", True)

"""What a training process is told: above all, from which checkpoint it goes on."""

import errno
import hashlib
import json
import os
import pwd
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.files import file_manifest
from app.infra.storage import Storage
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run
from tests.factories import Trainer, make_model, mark_checkpoint, mark_run
from tests.rows import add_run, run_row
from worker.attempts import job_builder
from worker.attempts.job_builder import Job, prepare_job
from worker.attempts.job_error import JobError
from worker.checkpoint_files import manifest
from worker.checkpoint_store.restore import RestoreControl

CPU = {"kind": "cpu", "index": 0, "id": "cpu-0"}
WAITS = RestoreControl(lambda: False, lambda _: None)
"""A run that nobody wants to end."""


class Context:
    """What preparing a job needs of its worker."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.id, self.name = "wrk_test", "here"
        self.settings, self.engine, self.storage = settings, engine, Storage(settings)
        self.working_copy: Any = None
        self.draining = threading.Event()


class Lab:
    """A run whose first attempt has left checkpoints, row and folder, and the worker of its next one."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.engine = engine
        self.context: Any = Context(settings, engine)
        self.storage = Storage(settings)
        run = add_run(engine)
        with engine.begin() as connection:
            row = connection.execute(select(Dataset.__table__).where(Dataset.id == run.dataset_id)).one()
        file = self.storage.dataset_file(row.id, row.extension)
        file.parent.mkdir(parents=True)
        file.write_text('{"text": "a"}\n')
        self.trainer = Trainer(engine, run.id)
        self.ids: dict[int, str] = {}

    def save(self, step: int) -> Path:
        """A whole checkpoint, as a trainer leaves it; answers its folder."""
        attempt = self.storage.attempt_dir(self.trainer.run_id, self.trainer.attempt)
        staging = attempt / ".staging"
        staging.mkdir(parents=True)
        (staging / "weights").write_bytes(bytes([step]) * 1000)
        digest = manifest.write_manifest(staging, step, {})
        manifest.commit(staging, attempt / f"checkpoint-{step}")
        self.ids[step] = self.trainer.checkpoint(
            step, manifest_sha256=digest, metrics={"best_loss": float(step), "best_eval_loss": step / 2}
        )
        return attempt / f"checkpoint-{step}"

    def next_attempt(self, restore_control: RestoreControl = WAITS) -> tuple[Job, dict[str, Any]]:
        """Prepare it; answers the job and what its file says."""
        self.trainer = self.trainer.retry()
        job = prepare_job(self.context, run_row(self.engine, self.trainer.run_id), CPU, restore_control)
        return job, json.loads(job.path.read_text())

    def bad_reasons(self) -> dict[int, str | None]:
        with self.engine.connect() as connection:
            rows = connection.execute(select(Checkpoint.step, Checkpoint.bad_reason)).all()
        return {row.step: row.bad_reason for row in rows}


@pytest.fixture
def lab(settings: Settings) -> Iterator[Lab]:
    engine = sync_engine(settings.database_url or "")
    yield Lab(settings, engine)
    engine.dispose()


def flip(folder: Path) -> None:
    """One bit of its weights, as a disk that ages does it."""
    content = bytearray((folder / "weights").read_bytes())
    content[500] ^= 1
    (folder / "weights").write_bytes(content)


def test_it_goes_on_from_the_furthest_checkpoint(lab: Lab) -> None:
    lab.save(10)
    newest = lab.save(20)
    job, reported = lab.next_attempt()
    assert (reported["resume_from"]["path"], reported["resume_from"]["step"]) == (str(newest), 20)
    assert (job.start.step, job.start.best_loss, job.start.best_score, job.remarks) == (20, 20.0, 10.0, [])


@pytest.mark.parametrize("damage", ["flipped", "torn", "gone"])
def test_a_damaged_checkpoint_is_marked_reported_and_skipped(lab: Lab, damage: str) -> None:
    good, newest = lab.save(10), lab.save(20)
    match damage:
        case "flipped":
            flip(newest)
        case "torn":
            (newest / "weights").write_bytes(b"\x14" * 400)
        case "gone":
            (newest / file_manifest.MANIFEST).unlink()
    job, reported = lab.next_attempt()
    assert (reported["resume_from"]["path"], job.start.step) == (str(good), 10)
    (remark,) = job.remarks
    assert lab.ids[20] in remark and "cannot be resumed from" in remark
    reasons = lab.bad_reasons()
    assert reasons[10] is None and reasons[20]


def test_when_every_checkpoint_is_damaged_training_starts_over(lab: Lab) -> None:
    for step in (10, 20):
        flip(lab.save(step))
    job, reported = lab.next_attempt()
    assert reported["resume_from"] is None
    assert (job.start.step, job.start.best_loss, len(job.remarks)) == (0, None, 2)


def test_a_run_that_resumes_another_never_starts_over_by_itself(lab: Lab) -> None:
    flip(lab.save(10))
    parent = lab.trainer
    parent.complete()
    child = add_run(lab.engine, parent_run_id=parent.run_id, resume_checkpoint_id=lab.ids[10])
    with lab.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == child.id).values(dataset_id=_dataset_of(lab)))
    lab.trainer = Trainer(lab.engine, child.id)
    with pytest.raises(JobError) as refused:
        prepare_job(lab.context, run_row(lab.engine, child.id), CPU, WAITS)
    assert refused.value.code == "config_error"
    assert '{"from": "start"}' in refused.value.message


def export_of(lab: Lab, step: int, task: str = "export") -> Any:
    """A run that exports, or evaluates, a checkpoint of the lab's run."""
    values = {"parent_run_id": lab.trainer.run_id, "resume_checkpoint_id": lab.ids[step], "task": task}
    export = add_run(lab.engine, **values)
    with lab.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == export.id).values(dataset_id=_dataset_of(lab)))
    return run_row(lab.engine, export.id)


def test_an_export_waits_for_a_store_that_is_away_and_takes_no_other_checkpoint(lab: Lab) -> None:
    lab.save(10)
    shutil.rmtree(lab.save(20))
    lab.trainer.complete()
    mark_checkpoint(lab.engine, lab.ids[20], replicated_at=func.now())
    with pytest.raises(JobError) as waits:
        prepare_job(lab.context, export_of(lab, 20), CPU, WAITS)
    assert waits.value.is_transient and waits.value.pause_seconds is not None
    assert lab.bad_reasons() == {10: None, 20: None}


@pytest.mark.parametrize("task", ["export", "evaluate"])
def test_run_on_a_damaged_checkpoint_names_and_marks_it_and_reads_no_other_one(
    lab: Lab, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.save(10)
    flip(lab.save(20))
    lab.trainer.complete()
    verified: list[Path] = []
    verify = manifest.verify
    monkeypatch.setattr(manifest, "verify", lambda place, *more: verified.append(place) or verify(place, *more))
    done, again = ("exported", "export") if task == "export" else ("used", "use")
    with pytest.raises(JobError, match=f"{lab.ids[20]} cannot be {done}: .*; {again} another one") as refused:
        prepare_job(lab.context, export_of(lab, 20, task), CPU, WAITS)
    assert not refused.value.is_transient and [place.name for place in verified] == ["checkpoint-20"]
    assert lab.bad_reasons()[20] is not None


def test_evaluation_of_a_checkpoint_whose_folder_is_missing_leaves_it_to_the_engine_of_its_run(lab: Lab) -> None:
    shutil.rmtree(lab.save(10))
    lab.trainer.complete()
    with pytest.raises(JobError, match="cannot be used: it is not in this worker's storage; use another one"):
        prepare_job(lab.context, export_of(lab, 10, "evaluate"), CPU, WAITS)
    assert lab.bad_reasons() == {10: None}


def test_half_written_folders_of_a_killed_trainer_are_swept(lab: Lab) -> None:
    whole = lab.save(10)
    torn = whole.with_name(".checkpoint-20.tmp")
    torn.mkdir()
    (torn / "weights").write_bytes(b"half")
    lab.next_attempt()
    assert whole.is_dir() and not torn.exists()


def test_a_file_that_this_worker_does_not_see_is_its_own_trouble(lab: Lab) -> None:
    run = run_row(lab.engine, lab.trainer.run_id)
    lab.storage.dataset_file(run.dataset_id, "jsonl").unlink()
    with pytest.raises(JobError) as refused:
        lab.next_attempt()
    assert refused.value.is_transient


def test_a_worker_without_the_storage_judges_no_checkpoint(lab: Lab) -> None:
    lab.save(10)
    lab.storage.root.rename(lab.storage.root.with_name("on another machine"))
    with pytest.raises(JobError) as refused:
        lab.next_attempt()
    assert refused.value.is_transient
    assert lab.bad_reasons() == {10: None}


def test_a_checkpoint_that_cannot_be_read_now_is_not_a_bad_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.save(10)

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(manifest, "read_below", refuse)
        lab.next_attempt()
    assert lab.bad_reasons() == {10: None}


def test_a_checkpoint_without_an_end_keeps_no_worker_for_ever(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file costs a hostile trainer nothing, and its manifest may say that it has to be so long."""
    monkeypatch.setattr(job_builder, "_MAX_PREPARATION_SECONDS", 0.5)
    folder = lab.save(10)
    os.truncate(folder / "weights", 2**40)
    text = json.dumps({"files": {"weights": {"bytes": 2**40, "sha256": "0" * 64}}})
    (folder / file_manifest.MANIFEST).write_text(text)
    with lab.engine.begin() as connection:
        digest = hashlib.sha256(text.encode()).hexdigest()
        connection.execute(update(Checkpoint).values(manifest_sha256=digest))
    with pytest.raises(TimeoutError, match="ANNEAL_STORAGE"):
        lab.next_attempt()


def test_a_worker_that_has_lost_the_run_judges_no_checkpoint_and_sweeps_nothing_of_its_successor(lab: Lab) -> None:
    """It stood still after its claim; meanwhile the run was given to another, whose trainer is saving."""
    flip(lab.save(10))
    lab.trainer = lab.trainer.retry()
    stale = run_row(lab.engine, lab.trainer.run_id)
    lab.trainer = lab.trainer.retry()
    saving = lab.storage.attempt_dir(lab.trainer.run_id, lab.trainer.attempt) / ".checkpoint-20.tmp"
    saving.mkdir(parents=True)
    prepare_job(lab.context, stale, CPU, WAITS)
    assert saving.is_dir()
    assert lab.bad_reasons() == {10: None}


REWARDS = [
    {"type": "length", "max": 3, "weight": 1.0}, {"type": "model", "model": "judge", "weight": 1.0},
    {"type": "model", "model": "org/judge", "weight": 0.5},
]  # fmt: skip


def test_it_says_where_each_reward_model_lies_in_the_order_of_the_rewards(lab: Lab) -> None:
    folder = make_model(lab.context.settings, "judge")
    judge = lab.trainer.complete()
    output = judge.write_output(lab.storage)
    rewards = [*REWARDS, {"type": "model", "model": judge.run_id, "weight": 1.0}]
    _, reported = _prepared(lab, {"method": "rlhf", "rlhf": {"rewards": rewards}})
    assert reported["reward_models"] == [
        {"name": "judge", "path": str(folder), "hub": None, "revision": None, "base": None},
        {"name": "org/judge", "path": None, "hub": "org/judge", "revision": None, "base": None},
        {"name": judge.run_id, "path": str(output), "hub": None, "revision": None, "base": None},
    ]


def test_the_base_of_an_output_is_that_of_its_training_where_two_roots_have_its_name(lab: Lab, tmp_path: Path) -> None:
    settings = lab.context.settings
    lab.context.settings = settings.model_copy(update={"extra_model_roots": str(tmp_path / "more")})
    folder = make_model(settings, "tiny")
    other = tmp_path / "more" / "tiny"
    shutil.copytree(folder, other)
    trained = lab.trainer.complete()
    (trained.write_output(lab.storage) / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny"}')
    for name, base in ((str(other), other), ("tiny", folder)):
        mark_run(lab.engine, trained.run_id, config={"base_model": name, "method": "lora"})
        _, reported = _prepared(lab, {"method": "lora", "base_model": trained.run_id})
        assert (reported["base_model"]["base"]["path"], reported["base_model"]["base"]["name"]) == (str(base), "tiny")


@pytest.mark.parametrize("base", ["tiny", "base_model", "run", "away"])
def test_base_of_a_downloaded_output_below_the_models_root_is_found_on_this_machine(lab: Lab, base: str) -> None:
    settings = lab.context.settings
    trained = lab.trainer.complete()
    output = trained.write_output(lab.storage)
    adapter = make_model(settings, "mine/downloaded", "adapter_config.json")
    places = {
        "tiny": make_model(settings),
        "base_model": make_model(settings, "mine/downloaded/base_model"),
        "run": output,
        "away": None,
    }
    name = trained.run_id if base == "run" else base
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    _, reported = _prepared(lab, {"method": "lora", "base_model": "mine/downloaded"})
    source = reported["base_model"]["base"]
    assert (source and source["path"]) == (places[base] and str(places[base]))


def test_job_of_other_methods_names_no_reward_model(lab: Lab) -> None:
    lab.trainer.complete()
    assert _prepared(lab, {"method": "dpo", "rlhf": {"rewards": []}})[1]["reward_models"] == []


def test_a_reward_model_that_is_gone_is_said_by_name(lab: Lab) -> None:
    lab.trainer.complete()
    with pytest.raises(JobError, match="judge") as refused:
        _prepared(lab, {"method": "rlhf", "rlhf": {"rewards": REWARDS}})
    assert refused.value.code == "model_not_found"


def _prepared(lab: Lab, config: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    """The job of a run that trains, on the hub's model and the lab's data, with this configuration."""
    run = add_run(lab.engine, backend="celery", config={"base_model": "org/model", **config})
    with lab.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == run.id).values(dataset_id=_dataset_of(lab)))
    lab.trainer = Trainer(lab.engine, run.id)
    job = prepare_job(lab.context, run_row(lab.engine, run.id), CPU, WAITS)
    return job, json.loads(job.path.read_text())


def _user() -> str:
    """Return a user to train as: `nobody` for root; whoever else runs this can only name itself."""
    return "nobody" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name


def _dataset_of(lab: Lab) -> str:
    dataset_id: str = run_row(lab.engine, lab.trainer.run_id).dataset_id
    return dataset_id


def test_trainers_write_a_journal_only_if_the_settings_ask_for_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _, recorded = lab.next_attempt()
    monkeypatch.delenv("ANNEAL_TRAINER_JOURNAL")
    assert Settings().trainer_journal is False
    lab.context.settings = lab.context.settings.model_copy(update={"trainer_journal": False, "trainer_user": _user()})
    job, silent = lab.next_attempt()
    path = lab.storage.journal_path(lab.trainer.run_id)
    assert (recorded["journal"], silent["journal"]) == (str(path), None)
    assert job.path.exists() and not path.exists()


class TestTokenCache:
    def test_every_run_gets_the_same_folder_which_no_one_else_may_enter(self, lab: Lab) -> None:
        _, reported = lab.next_attempt()
        _, again = lab.next_attempt()
        assert reported["token_cache"] == again["token_cache"]
        folder = Path(reported["token_cache"]["folder"])
        assert folder.is_relative_to(lab.storage.root) and folder.stat().st_mode & 0o777 == 0o700
        assert reported["token_cache"]["limit_bytes"] == lab.context.settings.token_cache_bytes

    def test_another_user_that_trains_has_a_folder_of_its_own(self, lab: Lab) -> None:
        _, own = lab.next_attempt()
        user = pwd.getpwnam(_user())
        lab.context.settings = lab.context.settings.model_copy(update={"trainer_user": user.pw_name})
        _, reported = lab.next_attempt()
        folder = Path(reported["token_cache"]["folder"])
        assert folder != Path(own["token_cache"]["folder"])
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (user.pw_uid, 0o700)
        assert folder.parent.stat().st_uid == os.getuid(), "the trainer can put nothing in the place of the folder"

    def test_job_without_room_for_a_cache_has_no_token_cache(self, lab: Lab) -> None:
        lab.context.settings = lab.context.settings.model_copy(update={"token_cache_bytes": 0})
        assert lab.next_attempt()[1]["token_cache"] is None

    def test_a_folder_that_cannot_be_made_costs_the_run_nothing(self, lab: Lab) -> None:
        (lab.storage.root / "cache").write_text("in the way")
        assert lab.next_attempt()[1]["token_cache"] is None


def test_job_of_a_serving_run_has_no_dataset_and_says_how_long_it_may_be_idle(lab: Lab) -> None:
    mark_run(lab.engine, lab.trainer.run_id, task="serve", dataset_id=None)
    lab.context.settings = lab.context.settings.model_copy(update={"serve_idle_seconds": 7.0})
    _, job = lab.next_attempt()
    assert (job["task"], job["dataset"], job["weights"], job["serve_idle_seconds"]) == ("serve", None, None, 7.0)

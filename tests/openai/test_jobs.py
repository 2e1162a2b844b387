"""Jobs as OpenAI's client lists, follows, pauses, resumes and cancels them: lineages of runs under one id."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from sqlalchemy import Engine, func, insert, or_, select, text, update

from app.infra.ids import new_id
from app.openai.ids import to_native_id, to_openai_id
from app.tables.runs import AttemptTimings, Run
from tests.app.uploads import lines
from tests.factories import Trainer, make_dataset, make_run
from tests.openai.conftest import client_of
from tests.openai.test_errors import error_of
from tests.openai.test_files import CHAT, upload
from tests.rows import add_run, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def chats(client: openai.OpenAI) -> str:
    file_id: str = upload(client, lines(CHAT)).id
    return file_id


class Jobs:
    """Creates jobs of the fake backend on one file."""

    def __init__(self, client: openai.OpenAI, file_id: str) -> None:
        self._client, self._file_id = client, file_id

    def create(self, native: dict[str, Any] | None = None, **parameters: Any) -> Any:
        extra_body = {"anneal": {"backend": "fake", **(native or {})}}
        return self._client.fine_tuning.jobs.create(
            model="tiny", training_file=self._file_id, extra_body=extra_body, **parameters
        )


@pytest.fixture
def jobs(client: openai.OpenAI, chats: str) -> Jobs:
    return Jobs(client, chats)


def trainer_of(engine: Engine, job_id: str) -> Trainer:
    return Trainer(engine, str(to_native_id(job_id, "run")))


def newest_run(api: ApiServer, job_id: str) -> dict[str, Any]:
    """The newest run of a job: a child of its other runs, if there are any."""
    run_id = str(to_native_id(job_id, "run"))
    while children := api.client.get("/v1/runs", params={"parent_run_id": run_id}).json()["data"]:
        (child,) = children
        run_id = child["id"]
    run: dict[str, Any] = api.client.get(f"/v1/runs/{run_id}").json()
    return run


class TestList:
    def test_jobs_are_listed_page_by_page_newest_first(self, client: openai.OpenAI, jobs: Jobs) -> None:
        ids = [jobs.create().id for _ in range(5)]
        assert [job.id for job in client.fine_tuning.jobs.list()] == ids[::-1]
        assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
        page = client.fine_tuning.jobs.list(limit=2, after=ids[3])
        assert [job.id for job in page.data] == [ids[2], ids[1]] and page.has_more

    def test_jobs_are_found_by_their_metadata(self, client: openai.OpenAI, jobs: Jobs) -> None:
        odd = {"größe & [x]=": "a b/ü%", "team": "docs"}
        first, second = jobs.create(metadata=odd).id, jobs.create(metadata={"team": "docs"}).id
        jobs.create()

        def list_ids(metadata: dict[str, str]) -> list[str]:
            return [job.id for job in client.fine_tuning.jobs.list(metadata=metadata, limit=1)]

        assert list_ids({"team": "docs"}) == [second, first]
        assert list_ids(odd) == [first] and list_ids({"größe & [x]=": "a b/ü%"}) == [first]
        assert list_ids({"team": "other"}) == list_ids({"größe": "x"}) == []

    def test_jobs_without_metadata_are_listed_by_null(self, client: openai.OpenAI, jobs: Jobs) -> None:
        named, plain = jobs.create(metadata={"team": "docs", "note": ""}).id, jobs.create().id

        def list_ids(**parameters: Any) -> list[str]:
            return [job.id for job in client.fine_tuning.jobs.list(limit=1, **parameters)]

        assert list_ids(extra_query={"metadata": "null"}) == [plain]
        assert list_ids(metadata=None) == list_ids(metadata={}) == [plain, named], "no filter"
        assert list_ids(metadata={"note": ""}) == [named] and list_ids(metadata={"team": ""}) == []
        assert list_ids(metadata={"null": "null"}) == []

    def test_job_lists_what_its_configuration_says(self, client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
        config = {
            "method": "lora", "lora_r": 8, "learning_rate": 1e-5, "batch_size": 2, "gradient_accumulation_steps": 3,
            "epochs": 2.0, "seed": 2**32 - 1, "report_to": ["tensorboard", "wandb"], "wandb_project": "p",
            "wandb_name": None,
        }  # fmt: skip
        run = add_run(engine, config=config, resources={"devices": 4, "sequence_parallel": 2})
        add_run(engine, config={"method": "dpo", "dpo": {"beta": 0.3}, "max_steps": 5})
        preferences, chat = client.fine_tuning.jobs.list().data
        assert (chat.id, chat.seed) == (to_openai_id(run.id), 2**32 - 1)
        assert chat.hyperparameters.to_dict() == {"batch_size": 12, "learning_rate_multiplier": 0.05, "n_epochs": 2}
        assert chat.method is not None and chat.method.type == "supervised"
        (integration,) = chat.integrations or ()
        wandb = {"project": "p", "name": None, "entity": None, "tags": []}
        assert integration.to_dict() == {"type": "wandb", "wandb": wandb}
        assert preferences.method is not None and preferences.method.dpo is not None
        assert preferences.method.dpo.to_dict()["hyperparameters"] == {
            "batch_size": 16, "learning_rate_multiplier": 1.0, "n_epochs": "auto", "beta": 0.3,
        }  # fmt: skip
        assert (preferences.seed, preferences.integrations) == (42, [])

    def test_runs_of_the_native_api_are_jobs_if_they_train(
        self, api: ApiServer, client: openai.OpenAI, engine: Engine
    ) -> None:
        run = make_run(api.client, make_dataset(engine, "rated"), config={"max_steps": 7, "method": "kto"})
        for task in ("evaluate", "export", "predict"):
            add_run(engine, task=task)
        add_run(engine, config={"extra": {"probe": True}})
        (job,) = client.fine_tuning.jobs.list()
        assert job.id == to_openai_id(run["id"]) and job.method is None
        assert (job.hyperparameters.n_epochs, job.model) == ("auto", "any")
        assert client.fine_tuning.jobs.retrieve(job.id) == job

    @pytest.mark.parametrize(
        ("query", "param"),
        [("limit=0", "limit"), ("limit=101", "limit"), ("after=run_1", "after"), ("order=asc", "order"),
         ("metadata=x", "metadata"), ("metadata=null&metadata[a]=b", "metadata"), ("tags[x]=y", "tags[x]")],
    )  # fmt: skip
    def test_wrong_parameter_is_named(self, api: ApiServer, query: str, param: str) -> None:
        answer = api.client.get(f"/openai/v1/fine_tuning/jobs?{query}")
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)

    @pytest.mark.parametrize("job_id", ["ftjob-x", "x", "run_" + "0" * 26, "ftjob-" + "0" * 26])
    def test_unknown_job_is_named(self, api: ApiServer, job_id: str) -> None:
        calls = [("GET", ""), ("GET", "/events"), ("GET", "/checkpoints")]
        calls += [("POST", f"/{verb}") for verb in ("cancel", "pause", "resume")]
        for method, path in calls:
            answer = api.client.request(method, f"/openai/v1/fine_tuning/jobs/{job_id}{path}")
            assert (answer.status_code, error_of(answer)["code"]) == (404, "job_not_found"), path


class TestStatus:
    def test_job_succeeds_with_a_model_and_its_trained_tokens(
        self, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id)
        assert client.fine_tuning.jobs.retrieve(id).status == "running"
        trainer.begin()
        timing = {"run_id": trainer.run_id, "attempt": 1, "similarity_key": "x", "measured_at": "2026-01-01"}
        with engine.begin() as connection:
            connection.execute(insert(AttemptTimings).values(**timing, timings={"tokens": 1234.0}))
        running = client.fine_tuning.jobs.retrieve(id)
        assert (running.status, running.fine_tuned_model, running.trained_tokens) == ("running", None, None)
        trainer.complete()
        done = client.fine_tuning.jobs.retrieve(id)
        assert (done.status, done.fine_tuned_model) == ("succeeded", trainer.run_id)
        assert done.trained_tokens == 1234 and done.finished_at is not None and done.finished_at >= done.created_at
        for refused in (client.fine_tuning.jobs.cancel, client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume):
            with pytest.raises(openai.ConflictError, match="has succeeded"):
                refused(id)

    def test_impossible_numbers_of_tokens_keep_no_job_from_being_listed(
        self, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        trainer = trainer_of(engine, jobs.create().id).begin()
        timing = {"run_id": trainer.run_id, "similarity_key": "x", "measured_at": "2026-01-01"}
        with engine.begin() as connection:
            for attempt in (1, 2):
                values = {**timing, "attempt": attempt, "timings": {"tokens": 1.7e308}}
                connection.execute(insert(AttemptTimings).values(values))
        trainer.complete()
        (job,) = client.fine_tuning.jobs.list()
        assert job.status == "succeeded" and job.trained_tokens == 2 * 10**18

    def test_job_that_fails_has_the_error_of_its_run(self, client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
        id = jobs.create().id
        trainer_of(engine, id).begin().fail("bad_data", "Row 3 has no answer.")
        failed = client.fine_tuning.jobs.retrieve(id)
        assert failed.status == "failed" and failed.error is not None
        error = (failed.error.code, failed.error.message, failed.error.param)
        assert error == ("bad_data", "Row 3 has no answer.", None)
        with pytest.raises(openai.ConflictError, match="has failed"):
            client.fine_tuning.jobs.cancel(id)

    def test_finish_of_a_running_job_is_estimated(self, client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
        id = jobs.create().id
        assert client.fine_tuning.jobs.retrieve(id).estimated_finish is None
        assert client.fine_tuning.jobs.list().data[0].estimated_finish is None


class TestCancel:
    def test_job_that_waits_is_cancelled_at_once_and_not_resumed(self, client: openai.OpenAI, jobs: Jobs) -> None:
        id = jobs.create().id
        for _ in range(2):
            cancelled = client.fine_tuning.jobs.cancel(id)
            assert (cancelled.id, cancelled.status) == (id, "cancelled") and cancelled.finished_at is not None
        for refused in (client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume):
            with pytest.raises(openai.ConflictError, match="was cancelled"):
                refused(id)

    def test_running_job_is_cancelled_from_the_request_on_without_saving(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id).begin()
        assert client.fine_tuning.jobs.cancel(id).status == "cancelled"
        assert newest_run(api, id)["stop_mode"] == "discard"
        trainer.cancel()
        assert client.fine_tuning.jobs.retrieve(id).status == "cancelled"

    def test_paused_job_is_cancelled(self, client: openai.OpenAI, jobs: Jobs) -> None:
        id = jobs.create().id
        assert client.fine_tuning.jobs.pause(id).status == "paused"
        assert client.fine_tuning.jobs.cancel(id).status == "cancelled"
        with pytest.raises(openai.ConflictError, match="was cancelled"):
            client.fine_tuning.jobs.resume(id)

    def test_resumed_job_that_a_pause_ends_during_the_request_is_cancelled(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        client.fine_tuning.jobs.pause(id)
        client.fine_tuning.jobs.resume(id)
        run_id = newest_run(api, id)["id"]
        Trainer(engine, run_id).begin()
        client.fine_tuning.jobs.pause(id)

        def is_waiting() -> bool:
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            with engine.connect() as connection:
                return connection.execute(text(waits)).first() is not None

        with ThreadPoolExecutor(1) as pool, engine.connect() as ending:
            ending.execute(select(Run.id).where(Run.id == run_id).with_for_update())
            answer = pool.submit(client.fine_tuning.jobs.cancel, id)
            eventually(is_waiting, what="the request waits for the run")
            ended = update(Run).where(Run.id == run_id)
            ending.execute(
                ended.values(status="cancelled", finished_at=func.now(), lease_owner=None, lease_expires_at=None)
            )
            ending.commit()
            assert answer.result().status == "cancelled"
        with pytest.raises(openai.ConflictError, match="was cancelled"):
            client.fine_tuning.jobs.resume(id)

    def test_cancel_waits_for_runs_in_the_order_of_all_other_changes(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        client.fine_tuning.jobs.pause(id)
        client.fine_tuning.jobs.resume(id)
        client.fine_tuning.jobs.pause(id)
        newest, first = newest_run(api, id)["id"], to_native_id(id, "run")
        lock = select(Run.id).with_for_update()
        with ThreadPoolExecutor(1) as pool, engine.connect() as changing:
            changing.execute(lock.where(Run.id == newest))
            once = client.with_options(max_retries=0)
            answer = pool.submit(once.fine_tuning.jobs.cancel, id)
            eventually(lambda: waiting_for_locks(engine) == 1, what="the request waits for the newest run")
            changing.execute(lock.where(Run.id == first))  # a deadlock, if the request has locked this one first
            changing.commit()
            assert answer.result().status == "cancelled"


class TestPause:
    def test_running_job_is_paused_once_it_has_saved_and_keeps_its_id_over_ten_resumes(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        first = jobs.create(metadata={"team": "docs"})
        for number in range(10):
            trainer = Trainer(engine, newest_run(api, first.id)["id"]).begin()
            assert client.fine_tuning.jobs.pause(first.id).status == "running", "it still saves"
            with pytest.raises(openai.ConflictError, match="is being paused") as refused:
                client.fine_tuning.jobs.resume(first.id)
            assert refused.value.code == "job_is_being_paused"
            trainer.checkpoint(number + 1, kind="stop")
            trainer.cancel()
            paused = client.fine_tuning.jobs.retrieve(first.id)
            assert (paused.status, paused.finished_at, paused.fine_tuned_model) == ("paused", None, None)
            assert client.fine_tuning.jobs.pause(first.id).status == "paused"
            resumed = client.fine_tuning.jobs.resume(first.id)
            assert (resumed.id, resumed.status, resumed.created_at) == (first.id, "queued", first.created_at)
            assert resumed.metadata == {"team": "docs"}
            assert newest_run(api, first.id)["current_step"] == number + 1
        assert [job.id for job in client.fine_tuning.jobs.list()] == [first.id]
        steps = [saved.step_number for saved in client.fine_tuning.jobs.checkpoints.list(first.id)]
        assert steps == [*range(10, 0, -1)]
        last = Trainer(engine, newest_run(api, first.id)["id"]).begin().complete()
        assert client.fine_tuning.jobs.retrieve(first.id).fine_tuned_model == last.run_id

    def test_job_paused_before_its_first_checkpoint_is_resumed_from_the_start(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        for _ in range(2):
            assert client.fine_tuning.jobs.pause(id).status == "paused"
            assert client.fine_tuning.jobs.resume(id).status == "queued"
        trainer = Trainer(engine, newest_run(api, id)["id"])
        client.fine_tuning.jobs.pause(id)
        trainer.cancel()
        assert client.fine_tuning.jobs.resume(id).status == "queued"
        assert newest_run(api, id)["resume_checkpoint_id"] is None
        assert [job.id for job in client.fine_tuning.jobs.list()] == [id]

    def test_failed_job_is_resumed(self, client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id).begin()
        trainer.checkpoint(5)
        trainer.fail()
        resumed = client.fine_tuning.jobs.resume(id)
        assert (resumed.id, resumed.status, resumed.error) == (id, "queued", None)

    def test_resume_of_a_job_that_waits_or_runs_changes_nothing(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs
    ) -> None:
        id = jobs.create().id
        assert client.fine_tuning.jobs.resume(id).status == "queued"
        assert newest_run(api, id)["id"] == to_native_id(id, "run")

    def test_job_that_several_resume_at_once_gets_one_run(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        client.fine_tuning.jobs.pause(id)
        keys = [api.key, api.key, api.key_with(["write", "read"]), api.key_with(["write", "read"])]

        def resume(key: str) -> str:
            with client_of(api, key) as other:
                try:
                    return str(other.fine_tuning.jobs.resume(id).status)
                except openai.ConflictError as error:
                    return str(error.code)

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(resume, keys))
        assert set(outcomes) <= {"queued", "job_has_changed"} and "queued" in outcomes
        newest_run(api, id)  # each run has at most one child
        assert len(api.client.get("/v1/runs").json()["data"]) == 2

    def test_run_that_is_resumed_natively_is_a_job_of_its_own(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs
    ) -> None:
        id = jobs.create().id
        client.fine_tuning.jobs.pause(id)
        answer = api.client.post(f"/v1/runs/{to_native_id(id, 'run')}/resume", json={"from": "start"})
        assert [job.id for job in client.fine_tuning.jobs.list()] == [to_openai_id(answer.json()["id"]), id]
        assert client.fine_tuning.jobs.retrieve(id).status == "paused"


def runs_of(engine: Engine, job_id: str) -> list[str]:
    """The runs of a job, newest first."""
    first = to_native_id(job_id, "run")
    with engine.connect() as connection:
        query = select(Run.id).where(or_(Run.id == first, Run.job_run_id == first))
        return [*connection.scalars(query.order_by(Run.id.desc()))]


class TestResultFile:
    def test_metrics_of_all_runs_of_a_job_are_a_csv_once_it_has_succeeded(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id).begin()
        for step in (1, 2, 3):
            trainer.metric(step, loss=3.0 - step / 2, extra={"token_accuracy": 0.5})
        assert client.fine_tuning.jobs.retrieve(id).result_files == []
        with pytest.raises(openai.NotFoundError, match="has not succeeded"):
            client.files.content(f"file-results-{id.removeprefix('ftjob-')}")
        client.fine_tuning.jobs.pause(id)
        trainer.checkpoint(2)
        trainer.cancel()
        client.fine_tuning.jobs.resume(id)
        resumed = Trainer(engine, newest_run(api, id)["id"]).begin()
        resumed.metric(3, loss=1.25)
        resumed.events("eval", {"step": 3, "metrics": {"eval_loss": 2.5, "eval_token_accuracy": 0.25}})
        resumed.metric(4, loss=1.125)
        resumed.complete()

        (file_id,) = client.fine_tuning.jobs.retrieve(id).result_files
        content = client.files.content(file_id)
        assert content.text == (
            "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n"
            "1,2.5,0.5,,\n2,2.0,0.5,,\n3,1.25,,2.5,0.25\n4,1.125,,,\n"
        )
        file = client.files.retrieve(file_id)
        assert (file.id, file.purpose, file.filename) == (file_id, "fine-tune-results", "step_metrics.csv")
        assert file.bytes == len(content.content) and file.status == "processed"
        with pytest.raises(openai.ConflictError, match="deleted with the runs of the job"):
            client.files.delete(file_id)
        assert api.client.post("/v1/runs/delete", json={"ids": runs_of(engine, id)}).status_code == 200
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                gone(file_id)


class TestEvents:
    def test_events_tell_the_life_of_a_job_over_its_runs_newest_first(
        self, api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id).begin()
        trainer.log("a line that is no event")
        trainer.metric(10, loss=2.31, learning_rate=1e-4, extra={"token_accuracy": 0.5})
        trainer.events("eval", {"step": 10, "metrics": {"eval_loss": 2.4}})
        trainer.events("skipped_rows", {"data": "training", "count": 1, "total": 2, "reason": "1 row was left out."})
        trainer.events("checkpoint", {"checkpoint_id": new_id("ckpt"), "step": 10, "kind": "periodic"})
        client.fine_tuning.jobs.pause(id)
        trainer.checkpoint(10)
        trainer.cancel()
        client.fine_tuning.jobs.resume(id)
        Trainer(engine, newest_run(api, id)["id"]).begin().fail("bad_data", "Row 3 has no answer.")
        events = [*client.fine_tuning.jobs.list_events(id)][::-1]
        lines = [(event.level, event.type, event.message) for event in events]
        assert lines == [
            ("info", "message", "The job is queued."),
            ("info", "message", "A worker prepares the training."),
            ("info", "message", "The training has started."),
            ("info", "metrics", "Step 10 of 100: training loss 2.31"),
            ("info", "metrics", "Step 10 of 100: validation loss 2.4"),
            ("warn", "message", "1 row was left out."),
            ("info", "message", "A checkpoint of step 10 was saved."),
            ("info", "message", "The training was stopped."),
            ("info", "message", "The job is queued."),
            ("info", "message", "A worker prepares the training."),
            ("info", "message", "The training has started."),
            ("error", "message", "Row 3 has no answer."),
            ("error", "message", "The job has failed."),
        ]
        data: Any = events[3].data
        assert data == {
            "step": 10, "total_steps": 100, "train_loss": 2.31, "learning_rate": 1e-4, "train_mean_token_accuracy": 0.5,
        }  # fmt: skip
        assert {event.object for event in events} == {"fine_tuning.job.event"}
        assert len({event.id for event in events}) == len(events)
        assert [event.created_at for event in events] == sorted(event.created_at for event in events)
        for limit in (1, 4, 5, 13):
            pages = client.fine_tuning.jobs.list_events(id, limit=limit)
            assert [event.id for event in pages] == [event.id for event in events[::-1]]

    def test_event_of_another_job_is_no_cursor(self, api: ApiServer, client: openai.OpenAI, jobs: Jobs) -> None:
        job_id, other = jobs.create().id, jobs.create().id
        (event,) = client.fine_tuning.jobs.list_events(other)
        for after in (event.id, "ftevent-x", "41"):
            answer = api.client.get(f"/openai/v1/fine_tuning/jobs/{job_id}/events", params={"after": after})
            assert (answer.status_code, error_of(answer)["param"]) == (400, "after")

    def test_what_a_trainer_reports_in_another_form_is_an_event_all_the_same(
        self, client: openai.OpenAI, jobs: Jobs, engine: Engine
    ) -> None:
        id = jobs.create().id
        trainer = trainer_of(engine, id).begin()
        trainer.mixed([("metric", {"step": 1, "loss": "x", "extra": []}), ("eval", {"step": None, "metrics": 7})])
        messages = [event.message for event in client.fine_tuning.jobs.list_events(id, limit=2).data]
        assert messages == ["Metrics: no loss", "Step 1 of 100: no loss"]


def test_checkpoints_are_listed_with_their_metrics(client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
    id = jobs.create().id
    trainer = trainer_of(engine, id).begin()
    metrics = {"loss": 1.5, "eval_loss": 2.5, "best_loss": 1.0}
    ids = [trainer.checkpoint(step, metrics=metrics) for step in (10, 20, 30)]
    saved = client.fine_tuning.jobs.checkpoints.list(id).data
    assert [checkpoint.fine_tuned_model_checkpoint for checkpoint in saved] == ids[::-1]
    assert [checkpoint.step_number for checkpoint in saved] == [30, 20, 10]
    assert {(checkpoint.object, checkpoint.fine_tuning_job_id) for checkpoint in saved} == {
        ("fine_tuning.job.checkpoint", id)
    }
    assert (saved[0].metrics.step, saved[0].metrics.train_loss, saved[0].metrics.valid_loss) == (30, 1.5, 2.5)
    assert [checkpoint.id for checkpoint in client.fine_tuning.jobs.checkpoints.list(id, limit=1)] == [
        checkpoint.id for checkpoint in saved
    ]


def test_key_that_only_reads_follows_jobs_and_changes_none(api: ApiServer, client: openai.OpenAI, jobs: Jobs) -> None:
    id = jobs.create().id
    with client_of(api, api.key_with(["read"])) as reader:
        assert reader.fine_tuning.jobs.retrieve(id).id == id and reader.fine_tuning.jobs.list_events(id).data
        for refused in (reader.fine_tuning.jobs.cancel, reader.fine_tuning.jobs.pause, reader.fine_tuning.jobs.resume):
            with pytest.raises(openai.PermissionDeniedError, match="requires `write`"):
                refused(id)

"""Jobs that OpenAI's client creates: each is a run with the parameters of the job."""

import threading
from typing import Any

import openai
import psycopg
import pytest
from sqlalchemy import Engine

from app.openai.ids import to_native_id
from tests.app.uploads import lines
from tests.factories import make_model
from tests.openai.conftest import async_client_of, client_of
from tests.openai.proxy import Fault, losing_answers, waiting_insertions
from tests.openai.test_errors import error_of
from tests.openai.test_files import CHAT, PAIR, TOOLS, upload
from tests.server import ApiServer
from tests.waiting import eventually

ASSISTANT = {"loss_on": "assistant"}
FAKE = {"anneal": {"backend": "fake"}}


def run_of(api: ApiServer, job_id: str) -> dict[str, Any]:
    """The first run of a job, as the native API shows it."""
    answer = api.client.get(f"/v1/runs/{to_native_id(job_id, 'run')}")
    assert answer.status_code == 200, answer.text
    run: dict[str, Any] = answer.json()
    return run


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    make_model(emptied_api.settings, "tiny")
    return emptied_api


@pytest.fixture
def chats(client: openai.OpenAI) -> str:
    file_id: str = upload(client, lines(CHAT, TOOLS)).id
    return file_id


def test_parameters_of_a_supervised_job_are_those_of_its_run(api: ApiServer, client: openai.OpenAI, chats: str) -> None:
    validation = upload(client, lines(CHAT)).id
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=chats,
        validation_file=validation,
        suffix="docs",
        seed=7,
        metadata={"team": "a=b&c", "größe": "ü"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 0.5}},
        },
        extra_body={"anneal": {"config": {"method": "lora", "lora_r": 8}, "tags": ["nightly"], "priority": 3}},
    )
    assert (job.object, job.status, job.model, job.seed) == ("fine_tuning.job", "queued", "tiny", 7)
    assert (job.training_file, job.validation_file) == (chats, validation)
    assert job.metadata == {"team": "a=b&c", "größe": "ü"} and job.result_files == [] and job.error is None
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 8)
    assert job.hyperparameters.learning_rate_multiplier == 0.5
    assert job.method is not None and job.method.type == "supervised" and job.method.supervised is not None
    assert job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.model_dump() == job.hyperparameters.model_dump()
    assert job.fine_tuned_model is job.finished_at is job.trained_tokens is None
    run = run_of(api, job.id)
    expected = {
        "base_model": "tiny", "method": "lora", "lora_r": 8, "epochs": 2, "batch_size": 4, "seed": 7,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "eval_steps": "epoch",
    }  # fmt: skip
    assert {name: run["config"][name] for name in expected} == expected
    assert (run["name"], run["tags"], run["priority"]) == ("docs", ["nightly"], 3)
    assert (run["dataset_id"], run["eval_dataset_id"]) == (to_native_id(chats, "ds"), to_native_id(validation, "ds"))
    assert client.fine_tuning.jobs.retrieve(job.id) == job


def test_supervised_job_on_chats_learns_the_assistant_unless_loss_on_is_set(
    api: ApiServer, client: openai.OpenAI, chats: str
) -> None:
    completions = upload(client, lines({"prompt": "a", "completion": "b"})).id

    def loss_on(training_file: str, **config: Any) -> str | None:
        extra = {"anneal": {"config": config}}
        job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file, extra_body=extra)
        value: str | None = run_of(api, job.id)["config"].get("loss_on")
        return value

    assert loss_on(chats) == loss_on(chats, method="full") == "assistant"
    assert loss_on(chats, loss_on="all") == "all"
    assert loss_on(completions) is None


def test_parameters_of_a_dpo_job_are_those_of_its_run(api: ApiServer, client: openai.OpenAI) -> None:
    pairs = upload(client, lines(PAIR)).id
    hyperparameters = {"beta": 0.2, "n_epochs": "auto", "batch_size": 6, "learning_rate_multiplier": 2.0}
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    job = client.fine_tuning.jobs.create(model="tiny", training_file=pairs, method=method)
    config = run_of(api, job.id)["config"]
    assert (config["method"], config["dpo"]["beta"], config["learning_rate"], config["epochs"]) == ("dpo", 0.2, 1e-5, 3)
    assert (config["batch_size"], config["gradient_accumulation_steps"]) == (3, 2)
    assert job.method is not None and job.method.type == "dpo" and job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None and job.method.dpo.hyperparameters.beta == 0.2


def test_what_is_left_out_or_auto_is_the_default_of_the_service(
    api: ApiServer, client: openai.OpenAI, chats: str
) -> None:
    auto: Any = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    jobs = [
        client.fine_tuning.jobs.create(model="tiny", training_file=chats),
        client.fine_tuning.jobs.create(model="tiny", training_file=chats, hyperparameters=auto),
        client.fine_tuning.jobs.create(model="tiny", training_file=chats, method={"type": "supervised"}),
        client.fine_tuning.jobs.create(
            model="tiny", training_file=chats, seed=None, suffix=None, metadata=None, integrations=None,
            validation_file=None, extra_body={"anneal": {"config": {}}},
        ),
    ]  # fmt: skip
    native = {"dataset_id": to_native_id(chats, "ds"), "config": {"base_model": "tiny"}}
    default = api.client.post("/v1/runs", json=native).json()
    for job in jobs:
        run = run_of(api, job.id)
        assert (run["config"], run["name"], run["tags"]) == (default["config"] | ASSISTANT, default["name"], [])
        assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 16)
        assert job.hyperparameters.learning_rate_multiplier == 1 and job.metadata is None


def test_deprecated_hyperparameters_are_those_of_a_supervised_job(
    api: ApiServer, client: openai.OpenAI, chats: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=chats, hyperparameters={"n_epochs": 5})
    assert run_of(api, job.id)["config"]["epochs"] == 5 and job.hyperparameters.n_epochs == 5


def test_integration_of_wandb_reports_the_metrics_there(api: ApiServer, client: openai.OpenAI, chats: str) -> None:
    wandb: Any = [{"type": "wandb", "wandb": {"project": "docs", "name": "first", "entity": "team"}}]
    with pytest.raises(openai.BadRequestError, match="wandb_api_key") as refused:
        client.fine_tuning.jobs.create(model="tiny", training_file=chats, integrations=wandb)
    assert refused.value.param == "integrations.0.type"
    api.client.put("/v1/secrets/wandb_api_key", json={"value": "0" * 40}).raise_for_status()
    job = client.fine_tuning.jobs.create(model="tiny", training_file=chats, integrations=wandb)
    config = run_of(api, job.id)["config"]
    assert (config["report_to"], config["wandb_project"], config["wandb_name"]) == (["wandb"], "docs", "first")
    assert job.integrations is not None and job.integrations[0].wandb.project == "docs"


def test_batch_is_divided_among_the_devices(api: ApiServer, client: openai.OpenAI, chats: str) -> None:
    anneal: dict[str, Any] = {"resources": {"devices": 2}}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=chats, hyperparameters={"batch_size": 12}, extra_body={"anneal": anneal}
    )
    config = run_of(api, job.id)["config"]
    assert (config["batch_size"], config["gradient_accumulation_steps"]) == (3, 2)
    assert job.hyperparameters.batch_size == 12


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"model": "gpt-4o-mini"}, "model", "model_not_found"),
        ({"model": "run_" + "0" * 26}, "model", "base_run_not_found"),
        ({"model": ""}, "model", "string_too_short"),
        ({"training_file": "file-" + "0" * 26}, "training_file", "file_not_found"),
        ({"training_file": "ds_1"}, "training_file", "file_not_found"),
        ({"training_file": 7}, "training_file", "string_type"),
        ({"validation_file": "file-none"}, "validation_file", "file_not_found"),
        ({"method": {"type": "dpo"}}, "training_file", "wrong_dataset_format"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo", "conflict"),
        ({"method": {"type": "other"}}, "method.type", "literal_error"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "value_error"),
        ({"hyperparameters": {"batch_size": "many"}}, "hyperparameters.batch_size", "value_error"),
        ({"hyperparameters": {"learning_rate_multiplier": -1}},
         "hyperparameters.learning_rate_multiplier", "value_error"),
        ({"hyperparameters": {"beta": 0.1}}, "hyperparameters.beta", "extra_forbidden"),
        ({"hyperparameters": {"learning_rate_multiplier": 1e3},
          "anneal": {"config": {"method": "full", "learning_rate": 1}}}, "anneal.config.learning_rate", "conflict"),
        ({"n_epochs": 3}, "n_epochs", "extra_forbidden"),
        ({"compute_multiplier": 3}, "compute_multiplier", "extra_forbidden"),
        ({"suffix": "x" * 65}, "suffix", "string_too_long"),
        ({"seed": -1}, "seed", "greater_than_equal"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "string_too_long"),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65, "string_too_long"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata", "too_long"),
        ({"metadata": {"k": 1}}, "metadata.k", "string_type"),
        ({"integrations": [{"type": "mlflow"}]}, "integrations.0.type", "literal_error"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "x", "tags": []}}]},
         "integrations.0.wandb.tags", "extra_forbidden"),
        ({"anneal": {"config": {"lora_r": 0}}}, "anneal.config.lora_r", None),
        ({"anneal": {"config": {"base_model": "tiny"}}}, "anneal.config.base_model", "conflict"),
        ({"anneal": {"config": {"method": "kto"}}, "method": {"type": "supervised"}},
         "anneal.config.method", "conflict"),
        ({"anneal": {"config": {"method": "dpo"}}, "method": {"type": "dpo"}}, "anneal.config.method", "conflict"),
        ({"anneal": {"dataset_id": "ds_1"}}, "anneal.dataset_id", "extra_forbidden"),
        ({"anneal": {"backend": "none"}}, "anneal.backend", "unknown_backend"),
        ({"anneal": {"experiment_id": "exp_none"}}, "anneal.experiment_id", "experiment_not_found"),
        ({"anneal": {"resources": {"devices": 2}}, "hyperparameters": {"batch_size": 3}},
         "hyperparameters.batch_size", "does_not_divide"),
        ({"anneal": {"resources": {"devices": "all"}}, "hyperparameters": {"batch_size": 4}},
         "hyperparameters.batch_size", "does_not_divide"),
    ],
)  # fmt: skip
def test_parameter_that_is_wrong_or_not_supported_is_refused_by_name(
    api: ApiServer, chats: str, client: openai.OpenAI, changes: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": "tiny", "training_file": chats, **changes}
    answer = api.client.post("/openai/v1/fine_tuning/jobs", json=body)
    error = error_of(answer)
    params = [one["field"] for one in error.get("errors", [])] or [error["param"]]
    assert answer.status_code == 400 and param in params, answer.text
    codes = [one["code"] for one in error.get("errors", ())]
    assert code in (None, "value_error", error["code"], *codes), error
    assert not client.fine_tuning.jobs.list().data


def test_all_errors_are_reported_at_once(api: ApiServer) -> None:
    answer = api.client.post("/openai/v1/fine_tuning/jobs", json={"model": "tiny", "seed": "x", "epochs": 3})
    error = error_of(answer)
    assert {one["field"] for one in error["errors"]} == {"training_file", "seed", "epochs"}
    assert error["param"] in ("training_file", "seed", "epochs")


class TestRetry:
    @pytest.mark.parametrize(("fault", "times", "timeout"), [("cut", 2, 20), ("hold", 1, 0.7)])
    def test_job_whose_answer_was_lost_is_created_once(
        self, api: ApiServer, client: openai.OpenAI, chats: str, fault: Fault, times: int, timeout: float
    ) -> None:
        with losing_answers(api, fault, times) as (proxy, url), client_of(api, url=url, timeout=timeout) as losing:
            job = losing.fine_tuning.jobs.create(
                model="tiny", training_file=chats, metadata={"a": "b"}, extra_body=FAKE
            )
        assert proxy.answers_lost == times
        assert [(listed.id, listed.metadata) for listed in client.fine_tuning.jobs.list()] == [(job.id, {"a": "b"})]

    def test_retry_during_the_first_attempt_waits_for_its_job(
        self, api: ApiServer, client: openai.OpenAI, chats: str, engine: Engine
    ) -> None:
        jobs: list[Any] = []

        def create(impatient: openai.OpenAI) -> None:
            jobs.append(impatient.fine_tuning.jobs.create(model="tiny", training_file=chats, extra_body=FAKE))

        with psycopg.connect(api.settings.database_url or "") as lock:
            lock.execute("LOCK TABLE runs IN SHARE ROW EXCLUSIVE MODE")
            with client_of(api, timeout=3, max_retries=4) as impatient:
                thread = threading.Thread(target=create, args=(impatient,))
                thread.start()
                eventually(lambda: waiting_insertions(engine) >= 2)
                lock.rollback()
                thread.join()
        assert [job.id for job in client.fine_tuning.jobs.list()] == [jobs[0].id]

    def test_same_job_created_twice_is_two_jobs(self, api: ApiServer, client: openai.OpenAI, chats: str) -> None:
        for _ in range(2):
            client.fine_tuning.jobs.create(model="tiny", training_file=chats, extra_body=FAKE)
        assert len(client.fine_tuning.jobs.list().data) == 2

    def test_idempotency_key_returns_the_first_job(self, api: ApiServer, client: openai.OpenAI, chats: str) -> None:
        headers = {"Idempotency-Key": "nightly"}
        ids = {
            client.fine_tuning.jobs.create(model="tiny", training_file=chats, extra_body=FAKE, extra_headers=headers).id
            for _ in range(2)
        }
        assert len(ids) == 1


async def test_asynchronous_client_creates_and_lists(api: ApiServer, chats: str) -> None:
    async with async_client_of(api) as client:
        job = await client.fine_tuning.jobs.create(model="tiny", training_file=chats, extra_body=FAKE)
        assert [listed.id async for listed in client.fine_tuning.jobs.list()] == [job.id]
        assert (await client.fine_tuning.jobs.cancel(job.id)).status == "cancelled"

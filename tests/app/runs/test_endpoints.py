"""Runs over the API: accepted once and for good, listed, read, stopped."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.schemas.runs.common import FACTS
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import is_id, new_id
from app.infra.storage import Storage
from app.runs.creating.creation import DEFAULT_ID
from tests.factories import Trainer, count_runs, make_dataset, make_experiment, make_model, make_run
from tests.rows import add_worker, claim, events_of, run_row
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def engine(api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(api.settings.database_url or "", pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


def body(dataset: str, **more: Any) -> dict[str, Any]:
    return {"backend": "fake", "dataset_id": dataset, "config": {"base_model": "any"}, **more}


def test_extra_evaluation_sets_stay_with_a_run_and_those_that_resume_it(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    sets = {"math": make_dataset(engine), "code": make_dataset(engine), "same": dataset}
    evaluated = {"base_model": "any", "eval_split": 0.5, "eval_steps": 10}
    created = api.client.post("/v1/runs", json=body(dataset, config=evaluated, extra_eval_datasets=sets)).json()
    Trainer(engine, created["id"]).begin().fail()
    other = make_run(api.client, dataset)
    resumed = api.client.post(f"/v1/runs/{created['id']}/resume", json={"from": "start"}).json()
    full = api.client.get("/v1/runs", params={"view": "full"}).json()["data"]
    listed = {run["id"]: run["extra_eval_datasets"] for run in full}
    assert listed == {created["id"]: sets, resumed["id"]: sets, other["id"]: {}}
    for run in (created, resumed):
        assert run["extra_eval_datasets"] == sets
        assert api.client.get(f"/v1/runs/{run['id']}").json()["extra_eval_datasets"] == sets
    compared = api.client.get("/v1/runs/compare", params={"ids": f"{created['id']},{other['id']}"}).json()
    assert compared["differences"]["extra_eval_datasets"] == {created["id"]: sets, other["id"]: {}}
    api.client.post(f"/v1/runs/{resumed['id']}/stop")
    for run in (resumed, created):
        assert api.client.delete(f"/v1/datasets/{sets['code']}").json()["code"] == "dataset_in_use"
        assert api.client.delete(f"/v1/runs/{run['id']}").status_code == 204
    assert api.client.delete(f"/v1/datasets/{sets['code']}").status_code == 204


class TestCreate:
    def test_create_returns_202_with_the_run_and_its_location(self, api: ApiServer, dataset: str) -> None:
        answer = api.client.post("/v1/runs", json=body(dataset, name="first", tags=["a"], priority=7))
        run = answer.json()
        assert answer.status_code == 202
        assert answer.headers["location"] == f"/v1/runs/{run['id']}"
        assert is_id(run["id"], "run") and run["run_id"] == run["id"]
        assert (run["status"], run["attempt"], run["current_step"]) == ("pending", 0, 0)
        assert (run["name"], run["tags"], run["priority"], run["max_restarts"]) == ("first", ["a"], 7, 3)
        assert run["metrics_history"] == [] and run["checkpoint_path"] is None and run["fine_tuned_model"] is None
        assert run["created_at"].endswith("Z") and len(run["created_at"]) == len("2026-01-02T03:04:05.678Z")

    def test_created_run_keeps_its_configuration_and_which_fields_the_user_set(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run = make_run(api.client, dataset, config={"base_model": "any", "lora_r": 8, "extra": {"steps": 5}})
        assert set(run["config"]) == set(TrainingConfig.model_fields)
        assert (run["config"]["lora_r"], run["config"]["lora_alpha"]) == (8, 32)
        row = run_row(engine, run["id"])
        assert row.user_set_fields == ["base_model", "extra.steps", "lora_r"]
        assert row.requirements == {} and row.devices_needed == 1
        assert run["created_by"].startswith("key_")

    def test_create_stores_the_first_event_with_the_run(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = make_run(api.client, dataset)
        (event,) = events_of(engine, run["id"])
        assert (event.seq, event.type, event.data["from"], event.data["to"]) == (1, "status", None, "pending")
        assert run["last_seq"] == 1

    def test_uses_the_default_experiment_unless_one_is_named(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        mine = make_experiment(engine)
        assert make_run(api.client, dataset)["experiment_id"] == DEFAULT_ID
        assert make_run(api.client, dataset, experiment_id=mine)["experiment_id"] == mine

    def test_names_the_run_after_method_and_model_unless_it_has_a_name(self, api: ApiServer, dataset: str) -> None:
        assert make_run(api.client, dataset)["name"] == "qlora of any"

    @pytest.mark.parametrize(
        ("config", "requirements"),
        [
            ({}, {"prefers_gpu": True}),
            ({"dtype": "bfloat16"}, {"prefers_gpu": True}),
            ({"optim": "paged_adamw_32bit"}, {"kind": "cuda"}),
            ({"dtype": "float16"}, {"kind": "cuda"}),
            ({"activation_offload": True}, {"kind": "cuda"}),
        ],
    )
    def test_asks_for_a_gpu_only_when_the_configuration_does(
        self, api: ApiServer, engine: Engine, dataset: str, config: dict[str, Any], requirements: dict[str, Any]
    ) -> None:
        run = make_run(api.client, dataset, backend="celery", config={"base_model": "org/model", **config})
        assert run_row(engine, run["id"]).requirements == requirements


class TestResources:
    def test_resources_are_stored_and_shown_with_device_requirements(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        resources = {"kind": "cuda", "gpu": None, "memory_mb": 24_000, "labels": ["site-b", "gpu=h100"]}
        run = make_run(api.client, dataset, resources=resources)
        defaults = {"devices": 1, "hosts": 1, "sharding": "auto", "sequence_parallel": 1, "expert_parallel": 1}
        assert run["resources"] == {**resources, **defaults}
        needs = {"kind": "cuda", "memory_mb": 24_000, "labels": ["gpu=h100", "site-b"]}
        assert run["requirements"] == {
            **needs,
            "gpu": None,
            "estimated_mb": {},
            "sharded": False,
            "sequence_parallel": 1,
            "expert_parallel": 1,
            "gguf": False,
            "gguf_quantizer": False,
            "prefers_gpu": False,
        }
        (listed,) = api.client.get("/v1/runs", params={"view": "full"}).json()["data"]
        assert (listed["resources"], listed["pending_reason"]) == (run["resources"], None)
        assert run_row(engine, run["id"]).requirements == needs

    def test_follow_from_the_estimate_unless_they_are_named(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        (make_model(api.settings, "qwen") / "config.json").write_text(json.dumps(QWEN3_8B))
        config = {"base_model": "qwen", "method": "qlora"}
        needs, named, full = (
            make_run(api.client, dataset, backend="celery", config=config | more, resources=asked)["requirements"]
            for asked, more in (({}, {}), ({"memory_mb": 1}, {}), ({"kind": "cuda"}, {"method": "full"}))
        )
        assert needs["prefers_gpu"] and 4_000 < needs["estimated_mb"]["cuda"] < 16_000
        assert (named["memory_mb"], named["estimated_mb"]) == (1, needs["estimated_mb"])
        assert full["kind"] == "cuda" and full["estimated_mb"]["cuda"] > 60_000 and "cpu" not in full["estimated_mb"]
        small = add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[3000])
        # A claim passes over a run whose estimate is being stored.
        claimed = eventually(lambda: claim(engine, small), what="a run is claimed")
        assert claimed.requirements["memory_mb"] == 1
        assert claim(engine, small) is None
        cpu = add_worker(engine, backends=["celery"], memory_mb=[10**6])
        assert claim(engine, cpu) is None, "no 8B model on a CPU beside a GPU"

    def test_resources_of_an_absurd_model_block_no_other_run(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        (make_model(api.settings, "absurd") / "config.json").write_text(json.dumps(QWEN3_8B | {"hidden_size": 10**12}))
        (make_model(api.settings, "qwen") / "config.json").write_text(json.dumps(QWEN3_8B))
        absurd, other = (
            make_run(api.client, dataset, backend="celery", config={"base_model": name}, resources={"kind": "cuda"})
            for name in ("absurd", "qwen")
        )
        assert absurd["requirements"]["estimated_mb"]["cuda"] == 2**31 - 1
        gpu = add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[200_000])
        # A claim passes over a run whose estimate is being stored.
        claimed = eventually(lambda: claim(engine, gpu), what="a run is claimed")
        assert claimed.id == other["id"]

    @pytest.mark.parametrize(
        ("resources", "field", "code"),
        [
            ({"devices": 2}, "resources.devices", "not_supported"),
            ({"devices": 0}, "resources.devices", None),
            ({"devices": "some"}, "resources.devices", None),
            ({"devices": "all"}, "resources.devices", "no_worker_online"),
            ({"hosts": 2}, "resources.hosts", "too_many_hosts"),
            ({"hosts": 0}, "resources.hosts", None),
            ({"sharding": "half"}, "resources.sharding", None),
            ({"kind": "tpu"}, "resources.kind", None),
            ({"memory_mb": "80 lines"}, "resources.memory_mb", None),
            ({"memory_mb": 2**40}, "resources.memory_mb", None),
            ({"labels": ["no spaces"]}, "resources.labels.0", None),
            ({"labels": ["a"] * 21}, "resources.labels", None),
            ({"gpu": 1}, "resources.gpu", None),
            (7, "resources", None),
        ],
    )
    def test_impossible_resources_are_refused(
        self, api: ApiServer, dataset: str, resources: Any, field: str, code: str | None
    ) -> None:
        body = {"dataset_id": dataset, "backend": "fake", "config": {"base_model": "any"}, "resources": resources}
        answer = api.client.post("/v1/runs", json=body)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["field"] == field and code in (None, error["code"]), error

    def test_all_is_as_many_as_the_largest_worker_has_when_the_run_is_created(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, 6, backends=["celery"])
        add_worker(engine, 3, kind="cuda", backends=["celery"])
        add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[4000, 9000], labels=["site-b"])
        body = {"backend": "celery", "dataset_id": dataset, "config": {"base_model": "org/model"}}
        for requested, number in (
            ({}, 3),  # a run of no certain kind is for a GPU
            ({"kind": "cpu"}, 6),
            ({"labels": ["site-b"]}, 2),
            ({"memory_mb": 9000}, 1),
        ):
            resources = {**requested, "devices": "all"}
            run = make_run(api.client, **body, resources=resources)
            row = run_row(engine, run["id"])
            assert (run["resources"]["devices"], row.devices_needed) == (number, number), requested
            estimate = api.client.post("/v1/runs/estimate", json={**body, "resources": resources}).json()
            assert (
                estimate
                == api.client.post(
                    "/v1/runs/estimate", json={**body, "resources": {**requested, "devices": number}}
                ).json()
            )
        refused = {**body, "resources": {"devices": "all", "labels": ["site-c"]}}
        assert not api.client.post("/v1/runs/validate", json=refused).json()["valid"]
        add_worker(engine, 8, kind="cuda", backends=["celery"])
        assert api.client.get(f"/v1/runs/{run['id']}").json()["resources"]["devices"] == 1, "it keeps its number"

    def test_a_model_that_no_device_holds_is_divided_among_several(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        (make_model(api.settings, "qwen") / "config.json").write_text(json.dumps(QWEN3_8B))
        add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[80_000] * 4)
        add_worker(engine, backends=["celery"], memory_mb=[1_000_000] * 4)

        def create_run(method: str, **requested: Any) -> Any:
            config = {"base_model": "qwen", "method": method, "max_seq_length": 512}
            resources = {"devices": 4, **requested}
            return make_run(api.client, dataset, backend="celery", config=config, resources=resources)["requirements"]

        small, large, whole = create_run("qlora"), create_run("full"), create_run("full", sharding="none")
        assert [needs["sharded"] for needs in (small, large, whole)] == [False, True, False]
        assert large["estimated_mb"]["cuda"] < 80_000 < whole["estimated_mb"]["cuda"]
        divided = create_run("qlora", sharding="full")
        assert divided["sharded"] and divided["estimated_mb"]["cuda"] < small["estimated_mb"]["cuda"]
        assert not create_run("full", kind="cpu")["sharded"], "the memory of the CPU worker is enough"

    @pytest.mark.parametrize(
        ("config", "says"),
        [
            ({"method": "qlora", "load_in_4bit": False, "load_in_8bit": True}, ["load_in_8bit"]),
            (
                {"method": "lora", "modules_to_save": ["lm_head"], "optim": "lion_8bit"},
                ["modules_to_save", "lion_8bit"],
            ),
            ({"method": "reward", "lora_r": 8}, ["modules_to_save"]),
            ({"method": "dpo", "lora_r": None}, ["precomputes its reference"]),
        ],
    )
    def test_a_model_that_cannot_be_divided_is_refused(
        self, api: ApiServer, engine: Engine, config: dict[str, Any], says: list[str]
    ) -> None:
        add_worker(engine, backends=["celery"], memory_mb=[80_000] * 2)
        data = make_dataset(engine, format="preference" if config["method"] in ("reward", "dpo") else "chat")
        body = {"dataset_id": data, "backend": "celery", "config": {"base_model": "org/model", **config}}
        fields = {"resources": {"devices": 2, "sharding": "full"}}
        errors = api.client.post("/v1/runs", json={**body, **fields}).json()["errors"]
        assert {(error["field"], error["code"]) for error in errors} == {("resources.sharding", "not_supported")}
        assert len(errors) == len(says) and all(word in one["message"] for word, one in zip(says, errors, strict=True))
        for sharding, devices in (("auto", 2), ("none", 2), ("full", 1)):
            resources = {"sharding": sharding, "devices": devices}
            answer = api.client.post("/v1/runs/validate", json={**body, "resources": resources}).json()
            assert answer["valid"], answer["errors"]

    @pytest.mark.parametrize(
        ("field", "value"), [("optim", "paged_adamw_32bit"), ("dtype", "float16"), ("activation_offload", True)]
    )
    def test_a_cpu_contradicts_settings_that_need_a_gpu(
        self, api: ApiServer, dataset: str, field: str, value: object
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "org/m", field: value}}
        response = api.client.post("/v1/runs", json={**body, "resources": {"kind": "cpu"}})
        (error,) = response.json()["errors"]
        assert (error["field"], error["code"]) == ("resources.kind", "conflict") and f"`{field}`" in error["message"]


class TestBrokerAway:
    def test_a_run_is_accepted_and_stopped_all_the_same(self, settings: Settings) -> None:
        alone = settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
        database = sync_engine(settings.database_url or "")
        with ThreadServer(alone) as api:
            run = make_run(api.client, make_dataset(database))
            stopped = api.client.post(f"/v1/runs/{run['id']}/stop")
        database.dispose()
        assert (run["status"], stopped.status_code, stopped.json()["status"]) == ("pending", 202, "cancelled")


class TestIdempotency:
    def test_the_same_key_with_the_same_body_answers_the_same_run(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        send = {"json": body(dataset), "headers": {"Idempotency-Key": "one"}}
        first, second = (api.client.post("/v1/runs", **send) for _ in range(2))
        assert first.status_code == second.status_code == 202
        assert first.json()["id"] == second.json()["id"]
        assert count_runs(engine) == 1
        assert len(events_of(engine, first.json()["id"])) == 1

    def test_the_same_key_with_another_body_is_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        headers = {"Idempotency-Key": "one"}
        first = api.client.post("/v1/runs", json=body(dataset), headers=headers).json()
        answer = api.client.post("/v1/runs", json=body(dataset, priority=1), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
        assert first["id"] in answer.json()["detail"]
        assert count_runs(engine) == 1

    def test_twenty_requests_at_once_with_one_key_make_one_run(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        answers: list[Any] = []

        def send() -> None:
            with api.client_with(api.key) as client:
                answers.append(client.post("/v1/runs", json=body(dataset), headers={"Idempotency-Key": "raced"}))

        threads = [threading.Thread(target=send) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert count_runs(engine) == 1

    def test_keys_of_two_callers_do_not_meet(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        headers = {"Idempotency-Key": "one"}
        mine = api.client.post("/v1/runs", json=body(dataset), headers=headers).json()
        with api.client_with(api.key_with(["write", "read"])) as other:
            theirs = other.post("/v1/runs", json=body(dataset), headers=headers).json()
        assert mine["id"] != theirs["id"]

    def test_a_key_that_is_no_plain_text_is_refused(self, api: ApiServer, dataset: str) -> None:
        for key in ("", "x" * 256):
            answer = api.client.post("/v1/runs", json=body(dataset), headers={"Idempotency-Key": key})
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["field"] == "Idempotency-Key"


class TestRead:
    def test_an_unknown_run_is_a_404_that_says_where_to_look(self, api: ApiServer) -> None:
        for run_id in (new_id("run"), "run_short", "../../etc/passwd", new_id("ds"), "x" * 5000):
            answer = api.client.get(f"/v1/runs/{run_id}")
            assert answer.status_code == 404
        assert api.client.get(f"/v1/runs/{new_id('run')}").json()["code"] == "run_not_found"

    def test_run_shows_progress_history_and_paths_of_checkpoint_and_output(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run = make_run(api.client, dataset)
        trainer = Trainer(engine, run["id"]).begin(total=60)
        for step in range(10, 70, 10):
            trainer.metric(step, loss=3 - step / 100, extra={"tokens_per_second": 100})
        trainer.checkpoint(40)
        newest = trainer.checkpoint(60, kind="final")
        trainer.complete()
        read = api.client.get(f"/v1/runs/{run['id']}").json()
        storage = Storage(api.settings)
        assert (read["status"], read["attempt"], read["total_steps"]) == ("completed", 1, 60)
        assert read["worker_id"] == trainer.worker_id
        assert [point["step"] for point in read["metrics_history"]] == [10, 20, 30, 40, 50, 60]
        assert read["metrics_history"][-1]["loss"] == pytest.approx(2.4)
        assert read["metrics_history"][-1]["extra"] == {"tokens_per_second": 100}
        assert read["checkpoint_path"] == str(storage.checkpoint_dir(run["id"], 1, 60)), newest
        assert read["fine_tuned_model"] == str(storage.output_dir(run["id"], 1))
        assert read["started_at"] and read["finished_at"]

    def test_run_shows_the_facts_that_its_trainer_reported_last(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run = make_run(api.client, dataset)
        assert run["facts"] is None

        def facts() -> Any:
            return api.client.get(f"/v1/runs/{run['id']}").json()["facts"]

        trainer = Trainer(engine, run["id"]).begin()
        assert facts() is None
        trainer.events("config", {"facts": {"fidelity": "exact"}}, {"facts": FACTS})
        trainer.log("a line")
        assert facts() == FACTS
        trainer = trainer.retry()
        assert facts() == FACTS, "those of the attempt before, until the new one has reported its own"
        trainer.events("config", {"facts": {**FACTS, "attention": "sdpa"}})
        trainer.begin().complete()
        assert facts() == {**FACTS, "attention": "sdpa"}

    def test_run_shows_at_most_the_last_hundred_points(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = make_run(api.client, dataset)
        Trainer(engine, run["id"]).begin().events("metric", *({"step": step, "loss": 1.0} for step in range(1, 251)))
        history = api.client.get(f"/v1/runs/{run['id']}").json()["metrics_history"]
        assert [point["step"] for point in history] == list(range(151, 251))

    def test_failed_run_shows_its_error(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = make_run(api.client, dataset)
        Trainer(engine, run["id"]).fail("out_of_memory", "too big")
        read = api.client.get(f"/v1/runs/{run['id']}").json()
        assert (read["status"], read["error_code"], read["error_message"]) == ("failed", "out_of_memory", "too big")


class TestList:
    def test_pages_through_all_runs_newest_first(self, api: ApiServer, dataset: str) -> None:
        run_ids = [make_run(api.client, dataset)["id"] for _ in range(5)]
        seen: list[str] = []
        page = api.client.get("/v1/runs", params={"limit": 2}).json()
        seen += [run["id"] for run in page["data"]]
        while page["has_more"]:
            page = api.client.get("/v1/runs", params={"limit": 2, "after": seen[-1]}).json()
            seen += [run["id"] for run in page["data"]]
        assert seen == run_ids[::-1]

    def test_filters(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        experiment = make_experiment(engine)
        tagged = make_run(api.client, dataset, experiment_id=experiment, tags=["x", "y"])["id"]
        two = make_run(api.client, dataset, config={"base_model": "other"})["id"]
        api.client.post(f"/v1/runs/{two}/stop")

        def ids(**filters: Any) -> list[str]:
            return [run["id"] for run in api.client.get("/v1/runs", params=filters).json()["data"]]

        assert ids() == [two, tagged]
        assert (
            ids(experiment_id=experiment) == ids(tag="y") == ids(base_model="any") == ids(status="pending") == [tagged]
        )
        assert ids(status="cancelled") == ids(base_model="other") == [two]
        assert ids(status=["cancelled", "pending"]) == [two, tagged]
        assert ids(tag="z") == ids(parent_run_id=tagged) == []

    def test_an_order_that_is_not_there_is_refused_rather_than_ignored(self, api: ApiServer) -> None:
        assert api.client.get("/v1/runs", params={"sort": "created_at"}).status_code == 200
        assert api.client.get("/v1/runs", params={"sort": "color"}).status_code == 422

    def test_an_unknown_status_is_refused(self, api: ApiServer) -> None:
        answer = api.client.get("/v1/runs", params={"status": "sleeping"})
        assert answer.status_code == 422
        assert "pending" in answer.json()["detail"]


class TestStop:
    def test_stop_ends_a_waiting_run_at_once(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = make_run(api.client, dataset)
        answer = api.client.post(f"/v1/runs/{run['id']}/stop", json={"save_checkpoint": False})
        assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
        assert answer.json()["stop_requested_at"] and answer.json()["finished_at"]
        assert [event.type for event in events_of(engine, run["id"])] == ["status", "status", "end"]

    def test_asks_a_training_run_and_remembers_whether_to_save(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run = make_run(api.client, dataset)
        Trainer(engine, run["id"]).begin()
        answer = api.client.post(f"/v1/runs/{run['id']}/stop", json={"save_checkpoint": False})
        assert (answer.status_code, answer.json()["status"]) == (202, "running")
        assert answer.json()["stop_requested_at"]
        assert run_row(engine, run["id"]).stop_mode == "discard"

    def test_stop_is_idempotent_also_on_a_stopped_run(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = make_run(api.client, dataset)
        trainer = Trainer(engine, run["id"]).begin()
        first, second = (api.client.post(f"/v1/runs/{run['id']}/stop") for _ in range(2))
        trainer.cancel()
        third = api.client.post(f"/v1/runs/{run['id']}/stop")
        assert [first.status_code, second.status_code, third.status_code] == [202, 202, 202]
        assert first.json()["stop_requested_at"] == third.json()["stop_requested_at"]
        assert third.json()["status"] == "cancelled"

    @pytest.mark.parametrize("end", ["completed", "failed"])
    def test_a_run_that_ended_by_itself_is_a_conflict_that_names_the_state(
        self, api: ApiServer, engine: Engine, dataset: str, end: str
    ) -> None:
        run = make_run(api.client, dataset)
        trainer = Trainer(engine, run["id"]).begin()
        trainer.complete() if end == "completed" else trainer.fail()
        answer = api.client.post(f"/v1/runs/{run['id']}/stop")
        assert (answer.status_code, answer.json()["code"]) == (409, "run_has_ended")
        assert end in answer.json()["detail"]

    def test_stop_with_invalid_fields_or_of_an_unknown_run_is_refused(self, api: ApiServer, dataset: str) -> None:
        run = make_run(api.client, dataset)
        for wrong in ({"save_checkpoint": "yes"}, {"save": True}, []):
            assert api.client.post(f"/v1/runs/{run['id']}/stop", json=wrong).status_code == 422
        assert api.client.post(f"/v1/runs/{new_id('run')}/stop").status_code == 404
        assert api.client.get(f"/v1/runs/{run['id']}").json()["status"] == "pending"

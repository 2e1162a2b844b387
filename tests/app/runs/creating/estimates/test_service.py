"""What a run would take is told before it is made, by its model's config.json, and stays beside what it took."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, text, update

from anneal.client.client import Anneal
from app.config import Settings
from app.infra.db import sync_engine
from app.runs.creating.estimates import service
from app.runs.creating.validation import models
from app.runs.creating.validation import request as validation
from app.tables.runs import StoredEstimate
from tests.app.runs.creating.estimates.estimating import QWEN, estimated, gpu
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.rows import add_worker
from tests.server import ApiServer, ThreadServer
from tests.waiting import HeldCalls, eventually


def test_a_run_is_counted_without_being_made(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_559)
    estimate = estimated(api, make_dataset(engine), max_steps=100)
    # https://huggingface.co/Qwen/Qwen3-8B: 8.2 billion.
    assert estimate["parameters"] == {"total": 8_190_735_360, "trainable": 43_646_976}
    memory = estimate["memory_mb"]
    # 4 bits and a constant's byte for 64 of the 6.9 billion weights in layers, 2 bytes for the rest.
    assert memory["weights"] == pytest.approx((6_945_767_424 / 2 + 1_244_967_936 * 2) / 2**20, rel=0.001)
    assert memory["quantization_constants"] == pytest.approx(6_945_767_424 / 64 / 2**20, rel=0.05)
    assert memory["weights"] < memory["total"] <= sum(memory.values()) - memory["total"]
    assert (estimate["steps"], estimate["device"]["name"]) == (100, "NVIDIA H100")
    assert estimate["confidence"] == {"memory": "formula", "seconds": "assumed"}
    assert estimate["seconds"] > 0 and estimate["cost"] is None
    assert any("4 bytes of the dataset's file" in sentence for sentence in estimate["assumptions"])
    assert api.client.get("/v1/runs").json()["data"] == []


def test_estimate_says_for_each_kind_of_device_if_it_fits_and_what_to_change(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_559)
    gpu(engine, 24_000, "NVIDIA A10")
    gpu(engine, 6_000, "NVIDIA T4")
    estimate = estimated(api, make_dataset(engine), batch_size=2, max_steps=10)
    by_name = {fit["device"]["name"]: fit for fit in estimate["fits"]}
    large, middle, small = (by_name[f"NVIDIA {name}"] for name in ("H100", "A10", "T4"))
    assert large["fits"] is True and large["advice"] == []
    # What has less room computes more again.
    assert [fit["gradient_checkpointing"] for fit in (large, middle)] == ["off", "selective"]
    assert middle["fits"] is True and middle["total_mb"] <= 0.9 * 24_000
    assert small["fits"] is False and "smaller model" in small["advice"][0]
    full = estimated(api, make_dataset(engine), method="full", max_steps=10)
    (advice,) = next(fit for fit in full["fits"] if fit["device"]["name"] == "NVIDIA H100")["advice"]
    assert "adapter" in advice


def test_memory_of_base_with_quantized_files_is_that_of_these(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_559)
    eight_bit = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (make_model(api.settings, "stored") / "config.json").write_text(
        json.dumps({**QWEN, "quantization_config": eight_bit})
    )
    dataset = make_dataset(engine)
    stored = estimated(api, dataset, base_model="stored", max_steps=10)
    assert stored["memory_mb"] == estimated(api, dataset, load_in_8bit=True, max_steps=10)["memory_mb"]
    assert stored["memory_mb"] != estimated(api, dataset, max_steps=10)["memory_mb"]


def test_memory_of_a_teacher_is_that_of_its_weights(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_559)
    (make_model(api.settings, "larger") / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 48}))
    dataset = make_dataset(engine, "chat")
    alone, taught = (
        estimated(api, dataset, max_steps=10, gradient_checkpointing=True, **config)
        for config in ({"method": "sft"}, {"method": "gkd", "gkd": {"teacher": "larger"}})
    )
    layers = 8_190_735_360 - 2 * 151936 * 4096
    weights = (8_190_735_360 + layers / 3) * 2 / 2**20
    assert taught["memory_mb"]["reference"] == pytest.approx(weights, rel=0.001)
    assert taught["memory_mb"]["total"] == pytest.approx(alone["memory_mb"]["total"] + weights, rel=0.001)
    assert any("weights of the teacher are `reference`" in sentence for sentence in taught["assumptions"])
    unknown = estimated(api, dataset, max_steps=10, method="gkd", gkd={"teacher": "org/elsewhere"})
    assert unknown["memory_mb"]["reference"] == 0
    assert any("teacher are not included" in sentence for sentence in unknown["assumptions"])


def test_liger_kernel_counts_if_all_workers_with_a_gpu_for_the_run_have_it(api: ApiServer, engine: Engine) -> None:
    dataset, said = make_dataset(engine), "are those of liger-kernel"

    def activations(resources: dict[str, Any] | None = None, **config: Any) -> tuple[float, bool]:
        estimate = estimated(api, dataset, resources, max_steps=10, gradient_checkpointing=False, **config)
        return estimate["memory_mb"]["activations"], any(said in sentence for sentence in estimate["assumptions"])

    add_worker(engine, backends=["celery"], packages=[])  # a CPU, on which nothing changes
    of_a_cpu = activations({"kind": "cpu"})
    gpu(engine, 81_559, packages=["liger-kernel", "torchao"])
    less, is_said = activations()
    assert is_said
    gpu(engine, 24_000, "NVIDIA A10", packages=["torchao"])
    more, is_said = activations()
    assert not is_said and less < 0.8 * more
    assert activations({"gpu": "h100"}) == (less, True)
    assert activations({"gpu": "a10"}) == (more, False)
    assert activations({"kind": "cpu"}) == of_a_cpu
    gpu(engine, 81_559)  # a worker of a version that reports no packages
    assert activations({"gpu": "h100"}) == (more, False)


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"kind": "cuda"}, "has a GPU; a GPU with bfloat16 is assumed."),
        ({"gpu": "h100"}, "has the GPU `h100` (`resources.gpu`); a GPU"),
        ({"memory_mb": 99_999}, "has a device with 99,999 MiB (`resources.memory_mb`); a GPU"),
        ({"kind": "cpu", "labels": ["site-a", "site-b"]}, "has a CPU with the labels `site-a`, `site-b`"),
    ],
    ids=["kind", "gpu", "memory", "labels"],
)
def test_estimate_says_that_no_worker_has_the_requested_device(
    api: ApiServer, engine: Engine, resources: dict[str, Any], says: str
) -> None:
    for label in ("site-a", "site-b"):
        add_worker(engine, backends=["celery"], memory_mb=[64_000], labels=[label])
    estimate = estimated(api, make_dataset(engine), resources, max_steps=5)
    assert estimate["fits"] == [] and estimate["device"]["kind"] == resources.get("kind", "cuda")
    assert f"No online worker of backend `celery` {says}" in estimate["assumptions"][0]
    assert estimate["memory_mb"]["total"] > 0 and estimate["flops"] > 0
    assert (estimate["seconds"], estimate["cost"]) == (None, None)
    assert {one["field"] for one in estimate["unknown"]} == {"seconds", "cost"}
    anyway = estimated(api, make_dataset(engine), resources, base_model="nobody/has-this", max_steps=5)
    assert anyway["device"]["kind"] == estimate["device"]["kind"]
    assert anyway["fits"] == [] and anyway["assumptions"][0].startswith("No online worker of backend `celery` has")


def test_the_estimate_is_for_a_device_that_the_request_allows(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_559)
    gpu(engine, 24_000, "NVIDIA A10")
    add_worker(engine, backends=["celery"], memory_mb=[64_000], labels=["site-a"])
    dataset = make_dataset(engine)

    def devices(**resources: Any) -> list[str]:
        estimate = estimated(api, dataset, resources, max_steps=5)
        assert estimate["device"] == estimate["fits"][0]["device"] and estimate["seconds"] > 0
        return [fit["device"]["name"] for fit in estimate["fits"]]

    assert devices() == ["NVIDIA H100", "NVIDIA A10", "cpu"]
    assert devices(kind="cuda") == ["NVIDIA H100", "NVIDIA A10"]
    assert devices(gpu="a10") == ["NVIDIA A10"]
    assert devices(kind="cpu") == devices(labels=["site-a"]) == ["cpu"]
    assert devices(memory_mb=64_000) == ["NVIDIA H100", "cpu"]
    config = {"base_model": "qwen", "max_steps": 5}
    run = make_run(api.client, dataset, backend="celery", config=config, resources={"gpu": "a10"})
    stored = eventually(lambda: api.client.get(f"/v1/runs/{run['id']}").json()["estimate"])
    assert stored["device"]["name"] == "NVIDIA A10"


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"model_type": "phi3", "rope_scaling": "x"}, "a value has the wrong type"),
        ({"model_type": "gpt2", "resid_pdrop": 10**400}, "not a number from 0 to 1"),
        ({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 16}, "not describe a llama model"),
        ({"model_type": "mamba2"}, "family 'mamba2' is not supported"),
        ([], "is not a JSON object"),
    ],
)
def test_unknown_estimate_is_null_with_its_reason(api: ApiServer, engine: Engine, file: Any, says: str) -> None:
    (api.settings.models_folder / "qwen" / "config.json").write_text(json.dumps(file))
    estimate = estimated(api, make_dataset(engine))
    assert [estimate[name] for name in ("parameters", "memory_mb", "seconds", "cost")] == [None] * 4
    assert {item["field"] for item in estimate["unknown"]} >= {"memory_mb", "seconds"}
    assert json.dumps(estimate).count(says) == 1 and says in estimate["unknown"][0]["reason"]


def test_steps_and_tokens_are_reported_without_the_model(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)  # 8 rows of, by its bytes, 25 tokens
    there, away = (estimated(api, dataset, base_model=name, max_steps=20) for name in ("qwen", "nobody/has-this"))
    assert (away["steps"], away["tokens"]) == (there["steps"], there["tokens"]) == (20, 20 * 8 * 25)
    assert any("The model's own sequence limit" in sentence for sentence in away["assumptions"])
    unlimited = estimated(api, dataset, base_model="nobody/has-this", max_steps=20, max_seq_length=None)
    assert (unlimited["steps"], unlimited["tokens"]) == (20, None)


def test_a_model_is_estimated_before_its_weights_are_here(api: ApiServer, engine: Engine) -> None:
    (api.settings.models_folder / "qwen" / "model.safetensors").unlink()
    body = {"dataset_id": make_dataset(engine), "config": {"base_model": "qwen", "max_steps": 5}}
    estimate = estimated(api, body["dataset_id"], max_steps=5)
    assert estimate["parameters"]["total"] == 8_190_735_360
    for path, more in (("", {}), ("/estimate", {"probe": True})):
        answer = api.client.post(f"/v1/runs{path}", json={**body, **more})
        assert answer.status_code == 422 and "no safetensors weights" in answer.text


def test_a_run_that_would_be_refused_is_refused(api: ApiServer, engine: Engine) -> None:
    body = {"dataset_id": make_dataset(engine), "config": {"base_model": "qwen", "lora_r": 0}}
    answer = api.client.post("/v1/runs/estimate", json=body)
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == "config.lora_r"


def test_an_estimate_stays_beside_what_was_measured(api: ApiServer, engine: Engine) -> None:
    with Anneal(api.url, api.key) as client:
        created = client.runs.create(
            {"dataset_id": make_dataset(engine), "config": {"base_model": "qwen", "max_steps": 100}}
        )
        assert created.estimate is None and created.measured is None, "no run waits for it"
        stored = eventually(lambda: client.runs.get(created.id).estimate)
        assert stored.parameters is not None and len(stored.fits) <= 1
        trainer = Trainer(engine, created.id)
        trainer.begin()
        for step, peak in ((1, 900.0), (2, 1400.0), (3, 1200.0)):
            trainer.metric(step, loss=1.0, gpu_memory_mb=peak)
        run = client.runs.get(created.id)
    assert run.estimate == stored
    assert run.measured is not None and run.measured.peak_memory_mb == 1400.0


def test_a_mistake_of_the_estimator_undoes_no_run(
    api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistaken(*_: Any) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(service, "estimate_by_formula", mistaken)
    created = make_run(api.client, make_dataset(engine), backend="celery", config={"base_model": "qwen"})
    eventually(lambda: "estimate failed" in caplog.text)
    assert created["id"] in caplog.text and "'qwen'" in caplog.text and "a mistake" in caplog.text
    run = api.client.get(f"/v1/runs/{created['id']}").json()
    assert (run["status"], run["estimate"]) == ("pending", None)


def test_no_row_is_locked_while_an_estimate_is_computed(
    api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, estimate_by_formula, checked = make_dataset(engine), service.estimate_by_formula, []

    def is_nothing_open() -> bool:
        query = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        with engine.connect() as connection:
            return bool(connection.scalar(text(query)))

    def watched(*arguments: Any) -> Any:
        # Those of background work last for a moment, that of a request until the estimate is computed.
        eventually(is_nothing_open, timeout=10, what="no transaction is open")
        checked.append(True)
        return estimate_by_formula(*arguments)

    monkeypatch.setattr(service, "estimate_by_formula", watched)
    estimated(api, dataset, max_steps=10)
    assert checked


def test_an_estimate_that_this_version_cannot_read_is_null(api: ApiServer, engine: Engine) -> None:
    run = make_run(api.client, make_dataset(engine), backend="celery", config={"base_model": "qwen"})
    eventually(lambda: api.client.get(f"/v1/runs/{run['id']}").json()["estimate"])
    with engine.begin() as connection:
        connection.execute(update(StoredEstimate).values(estimate={"of": "another version"}))
    answer = api.client.get(f"/v1/runs/{run['id']}")
    assert answer.status_code == 200 and answer.json()["estimate"] is None


def test_memory_of_a_model_that_a_plugin_creates_is_unknown_and_its_steps_are_counted(
    api: ApiServer, engine: Engine
) -> None:
    estimate = estimated(api, make_dataset(engine), extra={"model_factory": {"type": "mine"}})
    assert (estimate["parameters"], estimate["memory_mb"], estimate["steps"]) == (None, None, 3)
    assert "`extra.model_factory` is the plugin `mine`" in estimate["unknown"][0]["reason"]


def test_estimate_of_a_data_source_has_memory_only_and_assumes_a_plugin_optimizer(
    api: ApiServer, engine: Engine
) -> None:
    estimate = estimated(
        api, make_dataset(engine), extra={"data_source": {"type": "lake"}, "optimizer": {"type": "mine"}}
    )
    assert [estimate[name] for name in ("steps", "tokens", "flops", "seconds", "cost")] == [None] * 5
    assert {one["field"] for one in estimate["unknown"]} == {"steps", "tokens", "flops", "seconds", "cost"}
    assert all("`lake`" in one["reason"] for one in estimate["unknown"]) and estimate["memory_mb"]["total"] > 0
    assert any("`extra.optimizer` (`mine`)" in sentence for sentence in estimate["assumptions"])


def test_an_hour_has_its_price(settings: Settings) -> None:
    with ThreadServer(settings.model_copy(update={"gpu_hour_price": 3.6, "price_currency": "CHF"})) as api:
        engine = sync_engine(settings.database_url or "")
        (make_model(settings, "qwen") / "config.json").write_text(json.dumps(QWEN))
        gpu(engine, 81_559, devices=2)
        dataset = make_dataset(engine)
        on_one, on_two = (estimated(api, dataset, {"devices": devices}, max_steps=100) for devices in (1, 2))
        engine.dispose()
    assert on_one["cost"] == {"amount": pytest.approx(on_one["seconds"] / 1000, abs=1e-3), "currency": "CHF"}
    assert on_two["cost"]["amount"] == pytest.approx(2 * on_two["seconds"] / 1000, abs=1e-3)


def test_gpu_that_no_worker_has_is_estimated_with_its_memory_its_speed_and_its_price(settings: Settings) -> None:
    prices = {"gpu_hour_price": 1.0, "gpu_hour_prices": "H100=3.6, RTX 4090 = 0.4"}
    with ThreadServer(settings.model_copy(update=prices)) as api:
        engine = sync_engine(settings.database_url or "")
        (make_model(settings, "qwen") / "config.json").write_text(json.dumps(QWEN))
        gpu(engine, 6_000, "NVIDIA T4")
        engine.dispose()
        base = {"dataset_size": {"rows": "10k", "mean_tokens": 300}, "config": {"base_model": "qwen", "epochs": 1}}

        def on(device: str) -> dict[str, Any]:
            answer = api.client.post("/v1/runs/estimate", json={**base, "device": device})
            assert answer.status_code == 200, answer.text
            estimate: dict[str, Any] = answer.json()
            return estimate

        several = {"config": {**base["config"], "method": "lora"}, "resources": {"devices": 4}}
        divided = api.client.post("/v1/runs/estimate", json={**base, **several, "device": "RTX 5080"}).json()
        small, large, cheap = on("RTX 4090"), on("NVIDIA H100 80GB HBM3"), on("h200")
    assert any("divided among 4 devices" in sentence for sentence in divided["assumptions"])
    assert small["device"] == {"kind": "cuda", "name": "RTX 4090", "memory_mb": 24_564}
    assert [fit["device"]["name"] for fit in large["fits"]] == ["H100"]
    assert (large["steps"], large["tokens"]) == (625, 3_000_000)
    assert large["seconds"] == pytest.approx(large["flops"] / (989e12 * 0.4), rel=0.01)
    assert any("396 TFLOP/s, 40% of its data sheet" in sentence for sentence in large["assumptions"])
    assert any("300 tokens on average, as the request says" in sentence for sentence in large["assumptions"])
    for estimate, price in ((small, 0.4), (large, 3.6), (cheap, 1.0)):
        assert estimate["cost"]["amount"] == pytest.approx(estimate["seconds"] / 3600 * price, abs=1e-3)


def test_known_gpu_of_a_worker_has_the_speed_of_runs_there(api: ApiServer, engine: Engine) -> None:
    gpu(engine, 81_000, "NVIDIA H100 80GB HBM3")
    body = {"dataset_size": {"rows": 100}, "device": "H100", "config": {"base_model": "qwen"}}
    estimate = api.client.post("/v1/runs/estimate", json=body).json()
    assert estimate["device"] == {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory_mb": 81_000}


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "dataset_id", "missing"),
        ({"dataset_id": "ds_x", "dataset_size": {"rows": 5}}, "dataset_id", "conflict"),
        ({"dataset_size": {"rows": 0}}, "dataset_size.rows", "greater_than_equal"),
        ({"dataset_size": {"rows": "many"}}, "dataset_size.rows", "bad_count"),
        ({"dataset_size": {"rows": 5, "mean_tokens": -1}}, "dataset_size.mean_tokens", "greater_than_equal"),
        ({"dataset_size": {"rows": 5, "tokens": 1}}, "dataset_size.tokens", "extra_forbidden"),
        ({"dataset_size": {"rows": 5}, "probe": True}, "probe", "conflict"),
        ({"dataset_size": {"rows": 5}, "device": "Voodoo 2"}, "device", "unknown_device"),
        ({"dataset_size": {"rows": 5}, "device": "L4", "resources": {"kind": "cpu"}}, "device", "conflict"),
        ({"dataset_size": {"rows": 5}, "device": "L4", "resources": {"gpu": "A100"}}, "device", "conflict"),
    ],
)
def test_dataset_size_or_device_that_cannot_be_is_refused_with_its_field(
    api: ApiServer, engine: Engine, body: dict[str, Any], field: str, code: str
) -> None:
    answer = api.client.post("/v1/runs/estimate", json={"config": {"base_model": "qwen"}, **body})
    assert answer.status_code == 422, answer.text
    assert [(error["field"], error["code"]) for error in answer.json()["errors"]] == [(field, code)]


@pytest.mark.parametrize("prices", ["H100", "H100=cheap", "Voodoo 2=1", "H100=-1"])
def test_price_that_cannot_be_read_is_refused_at_the_start(prices: str) -> None:
    with pytest.raises(ValidationError, match=r"has no price; write it as H100=2\.9|is no known GPU"):
        Settings(gpu_hour_prices=prices)


def test_the_command_shows_it_as_tables_and_as_json(anneal: Any, run_file: Any, api: ApiServer) -> None:
    (make_model(api.settings, "qwen") / "config.json").write_text(json.dumps(QWEN))
    sets = ["--set", "backend=celery", "--set", "config.base_model=qwen", "--set", "config.max_steps=5"]
    shown = anneal("runs", "estimate", "-f", str(run_file), *sets)
    assert "43,646,976 of 8,190,735,360 parameters" in shown.stdout and "quantization constants" in shown.stdout
    as_json = json.loads(anneal("runs", "estimate", "-f", str(run_file), *sets, "--json").stdout)
    assert as_json["parameters"]["total"] == 8_190_735_360
    size = ["--rows", "10k", "--mean-tokens", "300", "--device", "L40S"]
    assert "L40S, 46,068 MiB" in anneal("runs", "estimate", "-f", str(run_file), *sets, *size).stdout


def test_estimate_of_a_backend_without_a_model_says_so(api: ApiServer, engine: Engine) -> None:
    config = {"base_model": "any", "extra": {"steps": 3, "step_seconds": 0}}
    body = {"backend": "fake", "dataset_id": make_dataset(engine), "config": config}
    answer = api.client.post("/v1/runs/estimate", json=body)
    assert answer.status_code == 200, answer.text
    assert "loads no model" in answer.text


class TestComputation:
    """Estimates have one thread, and requests a few connections to the database."""

    @pytest.fixture
    def held(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCalls]:
        calls = HeldCalls(monkeypatch, *getattr(request, "param", (service, "least_memory")))
        yield calls
        calls.go_on.set()

    @pytest.mark.parametrize(
        ("path", "held"),
        [
            ("/v1/runs", (service, "least_memory")),
            pytest.param("/v1/runs/validate", (service, "least_memory"), marks=pytest.mark.full),
            pytest.param("/v1/runs/estimate", (service, "estimate_by_formula"), marks=pytest.mark.full),
            ("/v1/runs", (validation, "config_problems")),
            pytest.param("/v1/runs", (models, "model_conflicts"), marks=pytest.mark.full),
            pytest.param("/v1/runs", (validation, "default_warnings"), marks=pytest.mark.full),
        ],
        indirect=["held"],
    )
    def test_estimate_is_computed_without_a_database_connection(
        self, api: ApiServer, engine: Engine, path: str, held: HeldCalls
    ) -> None:
        body = {"dataset_id": make_dataset(engine), "config": {"base_model": "qwen", "max_steps": 5}}
        with ThreadPoolExecutor(25) as clients:
            # More than the connections of the pool: if they kept theirs, no other request would get one.
            waiting = [clients.submit(api.client.post, path, json=body) for _ in range(25)]
            assert held.started.wait(30)
            answers = [api.client.post("/v1/experiments", json={"name": f"other {at}"}) for at in range(20)]
            assert {answer.status_code for answer in answers} == {201}
            assert not any(request.done() for request in waiting)
            held.go_on.set()
            assert {request.result().status_code for request in waiting} <= {200, 202}

    @pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/validate", "/v1/runs/estimate"])
    @pytest.mark.parametrize("held", [(validation, "default_warnings")], indirect=True)
    def test_dataset_that_is_deleted_meanwhile_is_refused_by_name(
        self, api: ApiServer, engine: Engine, held: HeldCalls, path: str
    ) -> None:
        dataset = make_dataset(engine)
        body = {"dataset_id": dataset, "config": {"base_model": "qwen", "max_steps": 5}}
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(api.client.post, path, json=body)
            assert held.started.wait(30)
            assert api.client.delete(f"/v1/datasets/{dataset}").status_code == 204
            held.go_on.set()
            answer = waiting.result()
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert (error["field"], error["code"]) == ("dataset_id", "dataset_not_found")

    def test_estimate_does_not_block_deletion_of_what_the_run_needs(
        self, api: ApiServer, engine: Engine, held: HeldCalls
    ) -> None:
        dataset = make_dataset(engine)
        experiment = api.client.post("/v1/experiments", json={"name": "short-lived"}).json()["id"]
        body = {
            "dataset_id": dataset,
            "experiment_id": experiment,
            "config": {"base_model": "qwen", "max_steps": 5},
        }
        with ThreadPoolExecutor(1) as clients:
            creating = clients.submit(api.client.post, "/v1/runs", json=body)
            assert held.started.wait(30)
            for path in (f"/v1/datasets/{dataset}", f"/v1/experiments/{experiment}"):
                assert api.client.delete(path).status_code == 204
            held.go_on.set()
            refused = creating.result()
        assert refused.status_code == 422
        assert {error["code"] for error in refused.json()["errors"]} == {"dataset_not_found", "experiment_not_found"}

    def test_estimates_of_one_key_are_computed_in_turn_and_those_of_others_at_once(self) -> None:
        async def order() -> list[str]:
            turns, finished, goes_on = service.EstimateTurns(), list[str](), asyncio.Event()

            async def estimate(key: str, name: str, waits: bool) -> None:
                async with turns.take_turn(key):
                    if waits:
                        await goes_on.wait()
                    finished.append(name)

            first = asyncio.create_task(estimate("a", "first", True))
            await asyncio.sleep(0)
            second = asyncio.create_task(estimate("a", "second", False))
            await estimate("b", "of another", False)
            goes_on.set()
            await asyncio.gather(first, second)
            return finished

        assert asyncio.run(order()) == ["of another", "first", "second"]

"""`probe: true` has a worker measure a run with two steps, and what that says about the whole run stands beside the
estimate."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, update

from anneal.client.client import Anneal
from anneal.contracts.training_config.fields import TrainerOptions
from app.infra.db import sync_engine
from app.tables.runs import Attempt
from tests.factories import Trainer, count_runs, make_dataset, make_experiment, make_model, mark_run
from tests.server import ApiServer
from tests.waiting import eventually

_CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
_MEASURED = {"step_seconds": 0.4, "data_seconds": 0.1, "tokens_per_second": 1000.0, "gpu_memory_reserved_mb": 950.0}


@pytest.fixture
def engine(api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(api.settings.database_url or "")
    (make_model(api.settings, "tiny") / "config.json").write_text(json.dumps(_CONFIG))
    yield engine
    engine.dispose()


def body(engine: Engine, **more: Any) -> dict[str, Any]:
    """A run of which everything that a probe leaves out is asked for."""
    config = {
        "base_model": "tiny", "max_steps": 300, "eval_split": 0.2, "eval_steps": 50, "early_stopping_patience": 2,
        "save_steps": "1k", "stop_at_step": 250, "on_spike": "rewind", "learning_rate": 1e-3,
        "extra": {"eval_on_start": True, "max_grad_norm": 2.0},
    }  # fmt: skip
    return {"dataset_id": make_dataset(engine), "name": "counting", "priority": 7, "config": config, **more}


def probed(api: ApiServer, request: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = api.client.post("/v1/runs/estimate", json={**request, "probe": True}, headers=headers)
    assert answer.status_code == 202, answer.text
    estimate: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{estimate['probe_run_id']}"
    return estimate


def measure(engine: Engine, run_id: str) -> Trainer:
    """Play a worker that measures: the first step is slow, the second one takes half a second."""
    trainer = Trainer(engine, run_id).begin(total=2)
    trainer.events("config", {"facts": {"device": "cpu", "device_name": "EPYC", "whole_run_steps": 240}})
    trainer.metric(1, loss=2.0, gpu_memory_mb=900.0, extra={**_MEASURED, "step_seconds": 9.0})
    trainer.metric(2, loss=1.0, gpu_memory_mb=880.0, extra=_MEASURED)
    return trainer


def test_the_answer_names_a_short_run_that_waits_like_any_other(api: ApiServer, engine: Engine) -> None:
    experiment = make_experiment(engine)
    request = body(engine, experiment_id=experiment, tags=["mine"], resources={"devices": 2})
    plain = api.client.post("/v1/runs/estimate", json=request).json()
    assert plain["probe_run_id"] is None and count_runs(engine) == 0
    estimate = probed(api, request, **{"Idempotency-Key": "k1"})
    assert estimate["steps"] == plain["steps"] == 250
    run = api.client.get(f"/v1/runs/{estimate['probe_run_id']}").json()
    assert (run["name"], run["tags"], run["priority"]) == ("probe of counting", ["mine", "probe"], 7)
    assert (run["experiment_id"], run["eval_dataset_id"], run["status"]) == (experiment, None, "pending")
    assert run["resources"]["devices"] == 2, "as many as the run would have"
    config = run["config"]
    left_out = {"eval_split": 0.0, "eval_steps": None, "early_stopping_patience": None, "stop_at_step": None}
    assert {name: config[name] for name in left_out} == left_out
    assert (config["on_out_of_memory"], config["on_spike"]) == ("stop", "ignore")
    assert (config["max_steps"], config["save_steps"], config["learning_rate"]) == (300, 1000, 1e-3)
    assert config["extra"] == {"max_grad_norm": 2.0, "probe": True}
    # It keeps what was estimated of the whole run, and the same request makes no second one.
    assert run["estimate"]["seconds"] == estimate["seconds"] is not None
    assert run["probe"] == estimate["probe"] and run["probe"]["message"] == "The probe has not ended yet."
    assert probed(api, request, **{"Idempotency-Key": "k1"})["probe_run_id"] == run["id"]
    assert count_runs(engine) == 1
    listed = api.client.get("/v1/audit").json()["data"]
    assert [(one["status"], one["resource"]) for one in listed if "estimate" in one["route"]] == [(202, run["id"])] * 2


def test_probe_extrapolates_two_steps_to_the_whole_run(api: ApiServer, engine: Engine) -> None:
    experiment = make_experiment(engine)
    request = body(engine, experiment_id=experiment)
    # How many packed sequences there are only the trainer knows.
    request["config"] |= {"packing": True, "max_steps": None, "stop_at_step": None}
    estimate = probed(api, request)
    measure(engine, estimate["probe_run_id"]).complete()
    mark_run(engine, estimate["probe_run_id"], best_loss=1.0)
    run = api.client.get(f"/v1/runs/{estimate['probe_run_id']}").json()
    assert run["measured"] == {
        "peak_memory_mb": 900.0, "reserved_memory_mb": 950.0, "tokens_per_second": 1000.0, "step_seconds": 0.5,
    }  # fmt: skip
    reported = run["probe"]
    # Of the 240 that the trainer has counted, a fifth is held out.
    assert (reported["fits"], reported["steps"], reported["seconds_at_most"]) == (True, 192, 96.0)
    assert reported["seconds"] == pytest.approx(min(estimate["tokens"] / 1000, 96.0), abs=0.1)
    assert "fits on EPYC" in reported["message"] and "900 MiB" in reported["message"]
    # Its loss and its speed are those of the longest rows: nothing is to be held against them.
    assert api.client.get(f"/v1/experiments/{experiment}").json()["best_runs"] == []
    assert api.client.post("/v1/runs/estimate", json=request).json()["confidence"]["seconds"] == "assumed"


def test_out_of_memory_is_an_answer_and_any_other_failure_is_none(api: ApiServer, engine: Engine) -> None:
    gpu, cpu, none = {"device": "cuda", "device_name": "H100"}, {"device": "cpu", "device_name": "EPYC"}, {}
    memory, killed = "out_of_memory", {"killed_by_kernel": True}
    for code, facts, report, fits, says in (
        (memory, gpu, {"phase": "training"}, False, "does not fit on H100: its longest rows ran out of memory."),
        (memory, gpu, {"phase": "loading"}, False, "does not fit on H100: it ran out of memory during loading."),
        (memory, gpu, {"phase": "training", **killed}, None, "The host ran out of memory during training"),
        (memory, cpu, {"phase": "training", **killed}, False, "does not fit on EPYC: its longest rows ran"),
        (memory, none, {"phase": "tokenizing"}, None, "The host ran out of memory during tokenizing"),
        ("bad_data", cpu, {"phase": "tokenizing"}, None, "before it measured anything"),
    ):
        estimate = probed(api, body(engine))
        trainer = Trainer(engine, estimate["probe_run_id"]).begin(total=2)
        trainer.events("config", {"facts": facts})
        trainer.fail(code, "Because of this.")
        with engine.begin() as connection:
            connection.execute(update(Attempt).where(Attempt.run_id == trainer.run_id).values(report=report))
        reported = api.client.get(f"/v1/runs/{estimate['probe_run_id']}").json()["probe"]
        assert reported["fits"] is fits and says in reported["message"] and "Because of this." in reported["message"], (
            reported
        )


# Each with the least that it needs to be accepted.
_OPTIONS: dict[str, dict[str, Any]] = {
    "spike_threshold": {"on_spike": "stop", "extra": {"spike_threshold": 4.0}},
    "max_rewinds": {"on_non_finite": "rewind", "extra": {"max_rewinds": 1}},
    "eval_batch_size": {"eval_split": 0.1, "eval_steps": 5, "extra": {"eval_batch_size": 2}},
    "eval_on_start": {"eval_split": 0.1, "eval_steps": 5, "extra": {"eval_on_start": True}},
    "metrics": {"eval_split": 0.1, "eval_steps": 5, "extra": {"metrics": ["bleu"]}},
    "packing_strategy": {"packing": True, "extra": {"packing_strategy": "wrapped"}},
    "padding_free": {"extra": {"padding_free": True}},
    "memory_profile": {"extra": {"memory_profile": "steps"}},
    "memory_profile_entries": {"extra": {"memory_profile": True, "memory_profile_entries": 5000}},
    "tiled_mlp": {"extra": {"tiled_mlp": True}},
    "wall_clock_breakdown": {"extra": {"wall_clock_breakdown": True}},
    "eval_log_steps": {"eval_split": 0.1, "eval_steps": 5, "extra": {"eval_log_steps": 10}},
    "double_quant": {"extra": {"double_quant": False}},
    "adam_beta1": {"optim": "adamw_torch", "extra": {"adam_beta1": 0.8}},
    "adam_beta2": {"optim": "adamw_torch", "extra": {"adam_beta2": 0.99}},
    "adam_epsilon": {"optim": "adamw_torch", "extra": {"adam_epsilon": 1e-7}},
    "optim_args": {"optim": "sgd", "extra": {"optim_args": {"momentum": 0.9}}},
    "lr_scheduler_kwargs": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "extra": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    },
    "max_grad_norm": {"extra": {"max_grad_norm": 2.0}},
    "peak_tflops": {"extra": {"peak_tflops": 100.0}},
    "distributions_steps": {"extra": {"distributions_steps": 10}},
    "probe": {"extra": {"probe": False}},
    **{
        kind: {"extra": {kind: {"type": "mine"}}}
        for kind in (
            "data_source",
            "model_factory",
            "optimizer",
            "scheduler",
            "checkpoint_engine",
            "tokenizer",
            "collator",
        )
    },
    "callbacks": {"extra": {"callbacks": [{"type": "mine"}]}},
    "prune_fraction": {"method": "full", "extra": {"prune_fraction": 0.5}},
}


def test_probe_accepts_every_valid_run_request(api: ApiServer, engine: Engine) -> None:
    assert _OPTIONS.keys() == TrainerOptions.model_fields.keys() - {"predict"}  # of another task
    dataset = make_dataset(engine)
    replaced = (
        "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "lr_scheduler_kwargs",
        "optimizer", "prune_fraction", "packing_strategy",
    )  # fmt: skip
    together: dict[str, Any] = {"extra": {}}
    for name, config in _OPTIONS.items():
        request = {"dataset_id": dataset, "config": {"base_model": "tiny", **config}}
        probed(api, request)  # it is validated like the run
        if name not in replaced:
            together = {**together, **config, "extra": {**together["extra"], **config["extra"]}}
    probed(api, {"dataset_id": dataset, "config": {"base_model": "tiny", **together}})


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"stop_at_step": 100}, 100),
        ({"eval_split": 0.25, "eval_steps": 50}, 180),
        ({"eval_split": 0.25, "eval_steps": 50, "min_steps": 200, "stop_at_step": 190}, 190),
        ({"eval_split": 0.25, "eval_steps": 50, "min_steps": 200}, 200),
    ],
)
def test_steps_that_the_trainer_counts_are_those_of_what_was_asked(
    api: ApiServer, engine: Engine, fields: dict[str, Any], steps: int
) -> None:
    config = {"base_model": "tiny", "packing": True, **fields}
    estimate = probed(api, {"dataset_id": make_dataset(engine), "config": config})
    measure(engine, estimate["probe_run_id"]).complete()
    assert api.client.get(f"/v1/runs/{estimate['probe_run_id']}").json()["probe"]["steps"] == steps


def test_a_repeated_request_finds_its_probe_also_when_the_model_is_gone(api: ApiServer, engine: Engine) -> None:
    request, key = body(engine), {"Idempotency-Key": "k2"}
    first = probed(api, request, **key)
    (api.settings.models_folder / "tiny" / "config.json").unlink()
    (api.settings.models_folder / "tiny").rename(api.settings.models_folder / "gone")
    assert probed(api, request, **key) == first
    answer = api.client.post("/v1/runs/estimate", json={**request, "name": "other", "probe": True}, headers=key)
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")


def test_unmeasurable_probe_is_refused_and_creates_nothing(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    fake = {"dataset_id": dataset, "backend": "fake", "config": {"base_model": "any", "method": "sft"}}
    wrong = {"dataset_id": dataset, "config": {"base_model": "tiny", "lora_r": 0}}
    for changes, field, code in (
        (fake, "probe", "not_supported"),
        (wrong, "config.lora_r", "out_of_range"),
    ):
        answer = api.client.post("/v1/runs/estimate", json={**changes, "probe": True})
        assert answer.status_code == 422
        assert [(error["field"], error["code"]) for error in answer.json()["errors"]] == [(field, code)]
    assert count_runs(engine) == 0


def test_client_and_command_wait_and_show_both(shared_api: ApiServer, anneal: Any, tmp_path: Any) -> None:
    api, engine = shared_api, sync_engine(shared_api.settings.database_url or "")
    (make_model(api.settings, "tiny") / "config.json").write_text(json.dumps(_CONFIG))
    for other in api.client.get("/v1/runs?status=pending").json()["data"]:
        api.client.post(f"/v1/runs/{other['id']}/stop")
    request = body(engine)
    (tmp_path / "run.json").write_text(json.dumps(request))

    def work() -> None:
        (waiting,) = eventually(lambda: api.client.get("/v1/runs?tag=probe&status=pending").json()["data"])
        measure(engine, waiting["id"]).complete()

    with ThreadPoolExecutor() as worker, Anneal(api.url, api.key) as client:
        done = worker.submit(work)
        both = client.runs.estimate(request, probe=True)
        done.result()
        assert both.memory_mb is not None and both.measured is not None and both.measured.step_seconds == 0.5
        assert both.probe is not None and both.probe.fits
        done = worker.submit(work)
        shown = anneal("runs", "estimate", "-f", str(tmp_path / "run.json"), "--probe").stdout
        done.result()
    engine.dispose()
    assert "peak memory, MiB" in shown and "900" in shown and "The run fits on EPYC" in shown
    assert "Download the model" not in shown

"""Runs that evaluate a model without training: how they are asked for, and what they refuse."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, func, select, text, update

from app.infra.ids import new_id
from app.runs.creating import inference
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from tests.app.runs.creating.inferences import refused, train
from tests.factories import Trainer, count_runs, make_dataset, make_run, mark_checkpoint, mark_run
from tests.rows import add_worker, events_of, run_row
from tests.server import ApiServer
from tests.waiting import HeldCalls, eventually

LORA = {"base_model": "tiny", "method": "lora", "lora_r": 8, "max_steps": 100, "eval_split": 0.1, "eval_steps": 10}
KEPT = {"batch_size": 2, "report_to": ["tensorboard"], "sample_steps": 5, "sample_prompts": ["why"]}


def evaluate(api: ApiServer, model: str, dataset: str, **body: Any) -> httpx.Response:
    return api.client.post("/v1/runs/evaluate", json={"model": model, "dataset_id": dataset, **body})


def evaluation_of(api: ApiServer, model: str, dataset: str, **body: Any) -> dict[str, Any]:
    answer = evaluate(api, model, dataset, **body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


def trained(api: ApiServer, engine: Engine, dataset: str, **config: Any) -> tuple[str, str]:
    return train(api, engine, dataset, {**LORA, **KEPT, **config})


def waits_for_a_lock(engine: Engine) -> bool:
    query = "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.scalar(text(query)))


class TestDeletionMeanwhile:
    """An evaluation is validated without a lock on the run, which it takes again before it is created."""

    def test_evaluation_of_a_run_deleted_meanwhile_is_refused_with_the_reason(
        self, api: ApiServer, engine: Engine, dataset: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id, checkpoint = trained(api, engine, dataset)
        held = HeldCalls(monkeypatch, inference, "_as_trained")
        with ThreadPoolExecutor(2) as clients:
            evaluations = [clients.submit(evaluate, api, model, dataset) for model in (run_id, checkpoint)]
            assert held.started.wait(30)
            assert api.client.delete(f"/v1/runs/{run_id}").status_code == 204
            held.go_on.set()
            codes = [refused(one.result())["model"] for one in evaluations]
        assert codes == ["run_not_found", "checkpoint_not_found"]


class TestRequest:
    def test_the_output_of_a_run_is_evaluated_with_its_configuration(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, _ = trained(api, engine, dataset, extra={"double_quant": True, "eval_on_start": True})
        other = make_dataset(engine)
        add_worker(engine, devices=2, backends=["celery"])
        overrides = {"max_eval_rows": "1k", "extra": {"eval_batch_size": 3}}
        answer = evaluate(api, run_id, other, config=overrides, tags=["t"], priority=3, resources={"devices": 2})
        run = answer.json()
        assert answer.status_code == 202 and answer.headers["location"] == f"/v1/runs/{run['id']}"
        assert (run["task"], run["status"], run["dataset_id"]) == ("evaluate", "pending", other)
        assert (run["base_run_id"], run["parent_run_id"], run["resume_checkpoint_id"]) == (run_id, None, None)
        assert (run["name"], run["tags"], run["priority"]) == ("evaluation of mine", ["t"], 3)
        parent = api.client.get(f"/v1/runs/{run_id}").json()
        assert parent["task"] == "train" and run["experiment_id"] == parent["experiment_id"]
        config = run["config"]
        inherited = {"method": "lora", "lora_r": 8, "batch_size": 2, "base_model": "tiny"}
        assert {name: config[name] for name in inherited} == inherited
        assert (config["max_eval_rows"], config["extra"]) == (1000, {"double_quant": True, "eval_batch_size": 3})
        assert (config["report_to"], config["eval_steps"], config["eval_split"]) == ([], None, 0.0)
        assert (config["sample_steps"], config["sample_prompts"]) == (None, [])
        row = run_row(engine, run["id"])
        assert (run["resources"]["devices"], row.devices_needed) == (2, 2)
        user_set_fields = row.user_set_fields
        assert {"lora_r", "max_eval_rows"} <= set(user_set_fields) and not {"eval_steps", "report_to"} & set(
            user_set_fields
        )
        assert events_of(engine, run["id"])[0].data["reason"] == f"evaluates {run_id}"
        assert not run["requirements"]["sharded"]

    def test_data_of_another_format_is_evaluated_with_the_loss_that_the_run_was_trained_with(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, saved = trained(api, engine, make_dataset(engine, "prompt_completion"))
        with engine.begin() as connection:
            effective = {**run_row(engine, run_id).config, "loss_on": "completion"}  # as its trainer reported
            connection.execute(update(Run).where(Run.id == run_id).values(effective_config=effective))
        assert [evaluation_of(api, model, dataset)["config"]["loss_on"] for model in (run_id, saved)] == [
            "completion", "completion",
        ]  # fmt: skip

    def test_several_devices_divide_the_model_only_if_the_request_says_so(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        """Also of a run whose optimizer cannot be divided: an evaluation has none."""
        run_id, _ = trained(api, engine, dataset, optim="adamw_8bit")
        add_worker(engine, devices=2, backends=["celery"])
        for sharding, sharded in (("auto", False), ("none", False), ("full", True)):
            resources = {"devices": 2, "sharding": sharding}
            answer = evaluate(api, run_id, dataset, resources=resources)
            assert answer.status_code == 202, answer.text
            assert answer.json()["requirements"]["sharded"] is sharded
        own, _ = trained(api, engine, dataset, modules_to_save=["lm_head"])
        answer = evaluate(api, own, dataset, resources={"devices": 2, "sharding": "full"})
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["field"], error["code"]) == (422, "resources.sharding", "not_supported")

    def test_a_checkpoint_also_of_a_run_that_trains_is_evaluated(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(api.client, dataset, config=LORA, backend="celery")["id"]
        saved = Trainer(engine, run_id).begin().checkpoint(20)
        run = evaluation_of(api, saved, dataset)
        assert (run["base_run_id"], run["parent_run_id"], run["resume_checkpoint_id"]) == (None, run_id, saved)

    def test_evaluation_and_deletion_of_its_run_wait_for_each_other(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, saved = trained(api, engine, dataset)
        with ThreadPoolExecutor(1) as pool, engine.begin() as connection:
            connection.execute(select(Run.id).where(Run.id == run_id).with_for_update())
            evaluation = pool.submit(evaluate, api, saved, dataset)
            eventually(lambda: waits_for_a_lock(engine))
            connection.execute(select(Checkpoint.id).where(Checkpoint.id == saved).with_for_update())
            connection.rollback()
            assert evaluation.result().status_code == 202, evaluation.result().text

    def test_a_base_model_is_evaluated_without_an_adapter(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run = evaluation_of(api, "tiny", dataset)
        assert (run["config"]["method"], run["config"]["base_model"], run["base_run_id"]) == ("full", "tiny", None)
        pairs = make_dataset(engine, "preference", ["prompt", "chosen", "rejected"])
        assert evaluation_of(api, "tiny", pairs, config={"method": "dpo"})["config"]["lora_r"] is None
        assert evaluation_of(api, "tiny", pairs, config={"method": "dpo", "lora_r": 4})["config"]["lora_r"] == 4

    def test_repeated_with_its_key_is_one_run(self, api: ApiServer, dataset: str) -> None:
        body = {"model": "tiny", "dataset_id": dataset}
        ids = {
            api.client.post("/v1/runs/evaluate", json=body, headers={"Idempotency-Key": "k"}).json()["id"]
            for _ in range(2)
        }
        assert len(ids) == 1


class TestRefusals:
    def test_a_model_that_cannot_be_evaluated(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        live = make_run(api.client, dataset, config=LORA, backend="celery")["id"]
        trainer = Trainer(engine, live).begin()
        gone, bad = trainer.checkpoint(20), trainer.checkpoint(40)
        mark_checkpoint(engine, gone, deleted_at=func.now())
        mark_checkpoint(engine, bad, bad_reason="torn")
        trainer.fail()
        fake = make_run(api.client, dataset)["id"]
        Trainer(engine, fake).begin().complete()
        outdated, _ = trained(api, engine, dataset)
        config = {**run_row(engine, outdated).config, "extra": {"removed": 1}}
        mark_run(engine, outdated, config=config, user_set_fields=["base_model", "extra.removed"])
        before = count_runs(engine)
        for model, code in (
            (live, "run_without_output"),
            (gone, "checkpoint_unusable"),
            (bad, "checkpoint_unusable"),
            (fake, "not_a_model"),
            (new_id("run"), "run_not_found"),
            (new_id("ckpt"), "checkpoint_not_found"),
        ):
            assert refused(evaluate(api, model, dataset)) == {"model": code}
        assert refused(evaluate(api, outdated, dataset)) == {"config.extra.removed": "unknown_field"}
        assert refused(evaluate(api, "nowhere", dataset)) == {"model": "model_not_found"}
        assert refused(evaluate(api, "../tiny", dataset)) == {"model": "invalid_name"}
        assert count_runs(engine) == before

    @pytest.mark.parametrize(
        ("config", "errors"),
        [
            ({"lora_r": 4}, {"config.lora_r": "not_changeable"}),
            ({"extra": {"eval_batch_size": 2, "probe": True}}, {"config.extra.probe": "not_changeable"}),
            ({"max_eval_rows": 0}, {"config.max_eval_rows": "out_of_range"}),
            ({"extra": [1]}, {"config.extra": "not_changeable"}),
            ({"nonsense": 1}, {"config.nonsense": "not_changeable"}),
        ],
    )  # fmt: skip
    def test_a_field_that_is_that_of_the_run(
        self, api: ApiServer, engine: Engine, dataset: str, config: dict[str, Any], errors: dict[str, str]
    ) -> None:
        run_id, _ = trained(api, engine, dataset)
        assert refused(evaluate(api, run_id, dataset, config=config)) == errors

    @pytest.mark.parametrize(
        ("config", "errors"),
        [
            ({"save_steps": 1, "nonsense": 1}, {"config.nonsense": "unknown_field"}),
            ({"early_stopping_patience": 1}, {"config.early_stopping_patience": "conflict"}),
            ({"base_model": "tiny"}, {"config.base_model": "conflict"}),
            ({"method": "lora", "lora_r": None}, {"config.lora_r": "conflict"}),
            ({"extra": [1]}, {"config.extra": "wrong_type"}),
            ({"method": "dpo"}, {"dataset_id": "wrong_dataset_format"}),
            ({"dpo": {"beta": 0.5}}, {"config.dpo": "conflict"}),
            ({"method": "best"}, {"config.method": "unknown_value"}),
        ],
    )
    def test_a_configuration_of_a_base_model(
        self, api: ApiServer, dataset: str, config: dict[str, Any], errors: dict[str, str]
    ) -> None:
        assert refused(evaluate(api, "tiny", dataset, config=config)) == errors

    def test_an_export_or_an_evaluation_names_what_to_evaluate_instead(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        """They have no checkpoints, which is what the advice names for a run that trained."""
        run_id, saved = trained(api, engine, dataset)
        evaluation = evaluation_of(api, run_id, dataset)["id"]
        Trainer(engine, evaluation).begin().complete()
        mark_run(engine, evaluation, output_attempt=None)
        path = f"/v1/runs/{run_id}/checkpoints/{saved}/export"
        exported = api.client.post(path, json={"output": "merged"}).json()["id"]
        for model, subject in ((evaluation, run_id), (exported, saved)):
            (error,) = evaluate(api, model, dataset).json()["errors"]
            assert error["code"] == "run_without_output" and f"use {subject}, whose" in error["message"]

    def test_a_configuration_of_any_length(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        """The limit is that of a run; what a run may have is evaluated, whatever the request adds to it."""
        schema = {"type": "json_schema", "schema": {"description": "x" * 66_000}}
        assert refused(evaluate(api, "tiny", dataset, config={"rewards": [schema]})) == {"config": "config_too_large"}
        run_id, _ = trained(api, engine, dataset)
        row = run_row(engine, run_id)
        names = [f"{number:04}{'q' * 190}" for number in range(400)]
        long = {"target_modules": names[:200], "modules_to_save": names[200:]}
        user_set_fields = [*row.user_set_fields, *long]
        mark_run(engine, run_id, config={**row.config, **long}, user_set_fields=user_set_fields)
        assert evaluation_of(api, run_id, dataset, config={"max_eval_rows": 5})["config"]["modules_to_save"]

    def test_an_evaluation_neither_resumes_nor_acts_nor_estimates(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = evaluation_of(api, "tiny", dataset)["id"]
        path = f"/v1/runs/{run_id}"
        assert refused(api.client.post(f"{path}/actions", json={"action": "checkpoint"})) == {
            "action": "not_for_this_task"
        }
        stopped = api.client.post(f"{path}/stop")
        assert (stopped.json()["status"], stopped.json()["stop"]["mode"]) == ("cancelled", "discard")
        resumed = api.client.post(f"{path}/resume", json={"from": "start"})
        assert (resumed.status_code, resumed.json()["code"]) == (409, "not_a_training")
        assert api.client.get(path).json()["estimate"] is None


RLHF = {"rewards": [{"type": "length", "max": 9}], "num_generations": 2}
QLORA = {"method": "qlora", "lora_r": 8}


class TestLossOfTheData:
    """Any model that writes text is evaluated on any data; the loss is that of the data."""

    @pytest.mark.parametrize(
        ("data_format", "columns", "trained_with", "expected"),
        [
            ("chat", ["messages"], {"method": "dpo", "dpo": {"beta": 0.5}}, {"method": "sft", "lora_r": 8}),
            ("text", ["text"], {"method": "rlhf", "rlhf": RLHF, "batch_size": 2}, {"method": "sft", "lora_r": 8}),
            ("preference", ["chosen"], {"packing": True}, {"method": "dpo", "load_in_4bit": False, "packing": False}),
            ("preference", ["chosen"], {"method": "full", "lora_r": None}, {"method": "dpo", "lora_r": None}),
            ("preference", ["chosen"], QLORA, {"method": "dpo", "load_in_4bit": True, "lora_r": 8}),
            ("rated", ["completion"], {"batch_size": 1}, {"method": "kto", "batch_size": 4}),
            ("prompt", ["prompt", "answer"], {"method": "kto"}, {"method": "rlhf", "lora_r": 8}),
        ],
    )  # fmt: skip
    def test_decides_for_an_adapter_and_for_full_weights(
        self, api: ApiServer, engine: Engine, data_format: str, columns: list[str], trained_with: dict[str, Any],
        expected: dict[str, Any],
    ) -> None:  # fmt: skip
        config = {"lora_r": 8, "eval_steps": None, "eval_split": 0.0, **trained_with}
        method = config.get("method", "lora")
        formats = {"dpo": "preference", "kto": "rated", "rlhf": "prompt"}
        run_id, saved = trained(api, engine, make_dataset(engine, formats.get(str(method), "chat")), **config)
        other = make_dataset(engine, data_format, columns)
        for model in (run_id, saved):
            run = evaluation_of(api, model, other)
            assert {name: run["config"][name] for name in expected} == expected
            assert (run["base_run_id"], run["resume_checkpoint_id"]) == (
                (run_id, None) if model == run_id else (None, saved)
            )
        if data_format == "prompt":
            assert [reward["type"] for reward in run["config"]["rlhf"]["rewards"]] == ["exact_match"]

    @pytest.mark.parametrize(
        ("data_format", "columns", "expected"),
        [
            ("chat", ["messages"], {"method": "full"}),
            ("preference", ["chosen"], {"method": "dpo", "lora_r": None}),
            ("rated", ["completion"], {"method": "kto", "lora_r": None}),
            ("prompt", ["prompt", "answer"], {"method": "rlhf", "lora_r": None}),
        ],
    )
    def test_decides_for_a_base_model(
        self, api: ApiServer, engine: Engine, data_format: str, columns: list[str], expected: dict[str, Any]
    ) -> None:
        config = evaluation_of(api, "tiny", make_dataset(engine, data_format, columns))["config"]
        assert {name: config[name] for name in expected} == expected

    def test_merged_output_is_a_base_model_of_its_own_unless_its_base_is_the_reference(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, _ = trained(api, engine, dataset, output="merged", target_modules=["q_proj"], max_seq_length=77)
        run = evaluation_of(api, run_id, dataset)
        expected = {"method": "sft", "base_model": run_id, "lora_r": None, "max_seq_length": 77}
        assert {name: run["config"][name] for name in expected} == expected
        assert run["config"]["target_modules"] is None and run["base_run_id"] == run_id
        pairs = make_dataset(engine, "preference", ["chosen"])
        run = evaluation_of(api, run_id, pairs)
        assert (run["config"]["method"], run["config"]["base_model"], run["base_run_id"]) == ("dpo", "tiny", run_id)

    def test_adapter_that_changed_its_base_is_compared_with_the_unchanged_one_as_an_output_alone(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, saved = trained(api, engine, dataset, init_lora_weights="pissa")
        pairs = make_dataset(engine, "preference", ["chosen"])
        config = evaluation_of(api, run_id, pairs)["config"]
        assert (config["method"], config["init_lora_weights"], config["lora_r"]) == ("dpo", "default", 8)
        assert refused(evaluate(api, saved, pairs)) == {"model": "checkpoint_changes_base"}
        assert evaluation_of(api, saved, dataset)["config"]["init_lora_weights"] == "pissa"

    def test_options_and_tokens_of_a_comparison_are_those_of_the_request(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        prompts = make_dataset(engine, "prompt", ["prompt"])
        pairs = make_dataset(engine, "preference", ["chosen"])
        dpo, _ = trained(api, engine, pairs, method="dpo", dpo={"beta": 0.5, "loss_type": "ipo"})
        run_id, _ = trained(api, engine, dataset)
        assert refused(evaluate(api, run_id, prompts)) == {"config.rlhf.rewards": "needs_rewards"}
        run = evaluation_of(api, run_id, prompts, config={"rlhf": RLHF})
        assert run["config"]["rlhf"]["num_generations"] == 2
        config = evaluation_of(api, dpo, pairs, config={"dpo": {"beta": 0.2}})["config"]
        assert (config["dpo"]["beta"], config["dpo"]["loss_type"]) == (0.2, "ipo")
        assert evaluation_of(api, dpo, dataset, config={"loss_on": "all"})["config"]["loss_on"] == "all"
        assert refused(evaluate(api, dpo, dataset, config={"dpo": {"beta": 1}})) == {
            "config.dpo.beta": "not_changeable"
        }

    def test_text_data_is_refused_for_a_reward_model(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        pairs = make_dataset(engine, "preference", ["chosen"])
        run_id, _ = trained(api, engine, pairs, method="reward", output="merged", sample_steps=None, sample_prompts=[])
        assert refused(evaluate(api, run_id, dataset)) == {"model": "reward_model_needs_pairs"}
        assert evaluation_of(api, run_id, pairs)["config"]["method"] == "reward"


class TestResult:
    def test_evaluation_result_is_on_its_run_and_is_not_ranked(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, _ = trained(api, engine, dataset)
        evaluated = evaluation_of(api, run_id, dataset)["id"]
        trainer = Trainer(engine, evaluated).begin()
        assert api.client.get(f"/v1/runs/{evaluated}").json()["evaluation"] is None
        metrics = {"eval_loss": 0.5, "eval_perplexity": None}
        trainer.events("eval", {"step": 100, "metrics": metrics, "non_finite": ["metrics.eval_perplexity"]})
        mark_run(engine, evaluated, best_score=0.5)
        trainer.complete()
        shown = api.client.get(f"/v1/runs/{evaluated}").json()
        assert (shown["evaluation"], shown["best_eval"]) == (metrics, 0.5)
        listed = [run["id"] for run in api.client.get("/v1/runs", params={"task": "evaluate"}).json()["data"]]
        assert listed == [evaluated]
        ranked = [run["id"] for run in api.client.get("/v1/runs", params={"sort": "best"}).json()["data"]]
        assert ranked == [run_id]
        deleted = api.client.delete(f"/v1/runs/{run_id}")
        assert deleted.status_code == 409 and deleted.json()["code"] == "run_is_needed"

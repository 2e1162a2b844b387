"""Runs in which a model answers the rows of a dataset: how they are asked for, resumed, and what they refuse."""

from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from anneal.contracts.methods import to_score
from app.infra.ids import new_id
from tests.app.runs.creating.inferences import refused, train
from tests.factories import Trainer, count_runs, make_dataset, make_run, mark_run
from tests.rows import events_of, run_row
from tests.server import ApiServer

LORA = {"base_model": "tiny", "method": "lora", "lora_r": 8, "max_steps": 100, "learning_rate": 1e-3}
DPO = {"base_model": "tiny", "method": "dpo", "lora_r": 8, "load_in_4bit": False, "dpo": {"beta": 0.2}}


def predict(api: ApiServer, model: str, dataset: str, **body: Any) -> httpx.Response:
    return api.client.post("/v1/runs/predict", json={"model": model, "dataset_id": dataset, **body})


def prediction_of(api: ApiServer, model: str, dataset: str, **body: Any) -> dict[str, Any]:
    answer = predict(api, model, dataset, **body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


class TestRequest:
    def test_output_of_a_run_answers_with_the_configuration_of_its_model_alone(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, _ = train(api, engine, dataset, LORA | {"extra": {"max_grad_norm": 2.0}, "use_dora": True})
        options = {"max_new_tokens": "1k", "temperature": 0.5, "stop": ["x"], "seed": 7, "dtype": "float32"}
        run = prediction_of(api, run_id, dataset, config=options, tags=["t"], priority=3)
        assert (run["task"], run["status"], run["name"], run["tags"]) == (
            "predict",
            "pending",
            "prediction of mine",
            ["t"],
        )
        assert (run["base_run_id"], run["parent_run_id"], run["resume_checkpoint_id"]) == (run_id, None, None)
        config = run["config"]
        expected = {
            "method": "lora",
            "lora_r": 8,
            "use_dora": True,
            "seed": 7,
            "dtype": "float32",
            "max_seq_length": None,
        }
        assert {name: config[name] for name in expected} == expected
        assert config["learning_rate"] == 2e-4 and list(config["extra"]) == ["predict"]
        predict_options = config["extra"]["predict"]
        assert (predict_options["max_new_tokens"], predict_options["temperature"], predict_options["stop"]) == (
            1000, 0.5, ["x"],
        )  # fmt: skip
        assert "learning_rate" not in run_row(engine, run["id"]).user_set_fields
        assert events_of(engine, run["id"])[0].data["reason"] == f"predicts with {run_id}"

    def test_weights_of_any_method_that_writes_text_answer_prompts(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        pairs = make_dataset(engine, "preference", ["prompt", "chosen", "rejected"])
        prompts = make_dataset(engine, "prompt", ["prompt"])
        run_id, saved = train(api, engine, pairs, DPO)
        for model in (run_id, saved, "tiny"):
            config = prediction_of(api, model, prompts)["config"]
            assert (config["method"], config["lora_r"]) == (("full", 16) if model == "tiny" else ("sft", 8))
            assert config["load_in_4bit"] is (model == "tiny") and config["dpo"]["beta"] == 0.1

    def test_repeated_with_its_key_is_one_run(self, api: ApiServer, dataset: str) -> None:
        body = {"model": "tiny", "dataset_id": dataset}
        ids = {
            api.client.post("/v1/runs/predict", json=body, headers={"Idempotency-Key": "k"}).json()["id"]
            for _ in range(2)
        }
        assert len(ids) == 1


class TestRefusals:
    def test_model_that_cannot_answer(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        pairs = make_dataset(engine, "preference", ["prompt", "chosen", "rejected"])
        judge, _ = train(api, engine, pairs, {"base_model": "tiny", "method": "reward", "lora_r": 8})
        live = make_run(api.client, dataset, config=LORA, backend="celery")["id"]
        Trainer(engine, live).begin().fail()
        prediction = prediction_of(api, "tiny", dataset)["id"]
        trainer = Trainer(engine, prediction).begin()
        saved = trainer.checkpoint(20)
        trainer.complete()
        before = count_runs(engine)
        for model, code in (
            (judge, "reward_model"),
            (live, "run_without_output"),
            (prediction, "not_a_model"),
            (saved, "not_a_model"),
            (new_id("run"), "run_not_found"),
            ("nowhere", "model_not_found"),
        ):
            assert refused(predict(api, model, dataset)) == {"model": code}
        body = {"backend": "celery", "dataset_id": dataset, "config": {**LORA, "base_model": prediction}}
        assert refused(api.client.post("/v1/runs", json=body)) == {"config.base_model": "not_a_model"}
        path = f"/v1/runs/{prediction}/checkpoints/{saved}/export"
        assert refused(api.client.post(path)) == {"checkpoint_id": "not_supported"}
        assert count_runs(engine) == before

    @pytest.mark.parametrize(
        ("config", "errors"),
        [
            ({"lora_r": 4}, {"config.lora_r": "extra_forbidden"}),
            ({"max_new_tokens": 0}, {"config.max_new_tokens": "greater_than_equal"}),
            ({"max_new_tokens": 10**9}, {"config.max_new_tokens": "less_than_equal"}),
            ({"temperature": -1}, {"config.temperature": "greater_than_equal"}),
            ({"scores": ["best"]}, {"config.scores.0": "literal_error"}),
            ({"rewards": [{"type": "regex", "pattern": "("}]}, {"config.rewards.0.pattern": "bad_pattern"}),
            ({"rewards": [{"type": "model", "model": "nowhere"}]}, {"config.rewards.0.model": "model_not_found"}),
        ],
    )
    def test_option_that_means_nothing_or_is_out_of_range(
        self, api: ApiServer, dataset: str, config: dict[str, Any], errors: dict[str, str]
    ) -> None:
        assert refused(predict(api, "tiny", dataset, config=config)) == errors

    def test_field_of_the_model_that_is_that_of_the_run(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run_id, _ = train(api, engine, dataset, LORA)
        assert refused(predict(api, run_id, dataset, config={"revision": "main"})) == {
            "config.revision": "not_changeable"
        }

    def test_data_without_prompts_or_without_references(self, api: ApiServer, engine: Engine) -> None:
        texts, prompts = make_dataset(engine, "text", ["text"]), make_dataset(engine, "prompt", ["prompt"])
        assert refused(predict(api, "tiny", texts)) == {"dataset_id": "wrong_dataset_format"}
        assert refused(predict(api, "tiny", new_id("ds"))) == {"dataset_id": "dataset_not_found"}
        for config in ({"scores": ["bleu"]}, {"rewards": [{"type": "exact_match"}]}):
            assert refused(predict(api, "tiny", prompts, config=config)) == {"dataset_id": "no_answers"}
        assert predict(api, "tiny", prompts).status_code == 202

    def test_several_devices(self, api: ApiServer, dataset: str) -> None:
        assert refused(predict(api, "tiny", dataset, resources={"devices": 2})) == {
            "resources.devices": "not_supported"
        }

    def test_training_with_options_of_a_prediction(self, api: ApiServer, dataset: str) -> None:
        config = LORA | {"extra": {"predict": {"max_new_tokens": 3}}}
        body = {"backend": "celery", "dataset_id": dataset, "config": config}
        assert refused(api.client.post("/v1/runs", json=body)) == {"config.extra.predict": "conflict"}


class TestResume:
    def test_stopped_prediction_of_a_checkpoint_continues_with_its_weights(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, weights = train(api, engine, dataset, LORA)
        first = prediction_of(api, weights, dataset)
        assert (first["parent_run_id"], first["resume_checkpoint_id"]) == (run_id, weights)
        trainer = Trainer(engine, first["id"]).begin(total=8)
        assert api.client.post(f"/v1/runs/{first['id']}/stop", json={}).json()["stop"]["mode"] == "checkpoint"
        saved = trainer.checkpoint(3)
        trainer.cancel()
        answer = api.client.post(f"/v1/runs/{first['id']}/resume", json={})
        again = answer.json()
        assert answer.status_code == 202, answer.text
        assert (again["task"], again["parent_run_id"], again["resume_checkpoint_id"]) == ("predict", first["id"], saved)
        assert again["config"] == first["config"] and again["current_step"] == 3
        anew = api.client.post(f"/v1/runs/{first['id']}/resume", json={"from": "start"}).json()
        assert (anew["resume_checkpoint_id"], anew["current_step"]) == (weights, 0)

    def test_prediction_without_a_checkpoint_starts_again_with_its_weights(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        _, weights = train(api, engine, dataset, LORA)
        first = prediction_of(api, weights, dataset)["id"]
        Trainer(engine, first).begin(total=8).fail()
        answer = api.client.post(f"/v1/runs/{first}/resume", json={})
        assert (answer.status_code, answer.json()["code"]) == (409, "no_checkpoint")
        anew = api.client.post(f"/v1/runs/{first}/resume", json={"from": "start"}).json()
        assert anew["resume_checkpoint_id"] == weights

    def test_prediction_that_has_answered_all_rows_is_refused(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        first = prediction_of(api, "tiny", dataset)["id"]
        trainer = Trainer(engine, first).begin(total=8)
        trainer.checkpoint(3)
        trainer.complete()
        answer = api.client.post(f"/v1/runs/{first}/resume", json={})
        assert (answer.status_code, answer.json()["code"]) == (422, "nothing_left_to_train")

    def test_what_would_change_the_answers_is_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        first = prediction_of(api, "tiny", dataset)["id"]
        trainer = Trainer(engine, first).begin(total=8)
        trainer.checkpoint(3)
        trainer.fail()
        for body, field in (({"config": {"seed": 2}}, "config.seed"), ({"stop_after_steps": 2}, "stop_after_steps")):
            answer = api.client.post(f"/v1/runs/{first}/resume", json=body)
            assert refused(answer) == {field: "not_changeable_on_resume"}


class TestResult:
    def test_predictions_are_ranked_among_each_other_by_their_scores(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id, _ = train(api, engine, dataset, LORA)
        predictions = {}
        for score in (0.25, 0.75, 0.5):
            prediction = predictions[score] = prediction_of(api, run_id, dataset)["id"]
            metrics = {"eval_score": score, "eval_bleu": 20.0}
            trainer = Trainer(engine, prediction).begin(total=8)
            trainer.events("eval", {"step": 8, "epoch": 1.0, "metrics": metrics})
            mark_run(engine, prediction, best_score=to_score(run_row(engine, prediction).config, score))
            trainer.complete()
            shown = api.client.get(f"/v1/runs/{prediction}").json()
            assert (shown["evaluation"], shown["best_eval"]) == (metrics, score)
        query = {"sort": "best", "task": "predict"}
        first = api.client.get("/v1/runs", params={**query, "limit": 2}).json()["data"]
        rest = api.client.get("/v1/runs", params={**query, "after": first[-1]["id"]}).json()["data"]
        assert [run["id"] for run in first + rest] == [predictions[score] for score in (0.75, 0.5, 0.25)]
        assert [run["best_eval"] for run in first] == [0.75, 0.5]
        ranked = api.client.get("/v1/runs", params={"sort": "best"}).json()["data"]
        assert [run["id"] for run in ranked] == [run_id]
        ids = ",".join(predictions.values())
        compared = api.client.get("/v1/runs/compare", params={"ids": ids}).json()["runs"]
        assert all(run["metrics"]["eval.eval_bleu"]["last"] == 20.0 for run in compared)

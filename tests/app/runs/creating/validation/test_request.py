"""Bad input gets a clear error and loses nothing: status, code and a sentence for each, and no run is made."""

import asyncio
import json
import math
from typing import Any

import pytest
from sqlalchemy import Engine, update

from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.validation import config_errors
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.creating.validation import config
from app.tables.datasets import Dataset
from tests.app.on_shared_api import OnSharedApi
from tests.factories import Trainer, count_runs, make_dataset, make_model, make_run
from tests.rows import add_worker, run_row
from tests.server import ApiServer, ThreadServer
from tests.specified_config import SpecifiedConfig

FAKE = {"backend": "fake"}
_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


def refused(api: ApiServer, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """What `POST /v1/runs` says to a body that it must refuse, and that it has made nothing."""
    before = count_runs(engine)
    answer = api.client.post("/v1/runs", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert count_runs(engine) == before
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == 422 and problem["request_id"]
    assert all(error["message"] for error in problem["errors"])
    return problem


def only_error(problem: dict[str, Any]) -> tuple[str, str, str]:
    """Field, code and sentence of the one error; the answer's own code is the same."""
    (error,) = problem["errors"]
    assert problem["code"] == error["code"]
    return error["field"], error["code"], error["message"]


CONFIGS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"learning_rte": 1e-4}, "learning_rte", "unknown_field", "perhaps `learning_rate`"),
    ({"batch_size": "4x"}, "batch_size", "bad_count", '"4x" is not a count; write 10000, "10k"'),
    ({"batch_size": 4.5}, "batch_size", "wrong_type", "integer"),
    ({"packing": 1}, "packing", "wrong_type", "boolean"),
    ({"epochs": -1}, "epochs", "out_of_range", "greater than 0"),
    ({"batch_size": 0}, "batch_size", "out_of_range", "greater than or equal to 1"),
    ({"learning_rate": 1e6}, "learning_rate", "out_of_range", "10"),
    ({"max_seq_length": 10**30}, "max_seq_length", "out_of_range", "10000000"),
    ({"method": "magic"}, "method", "unknown_value", "qlora"),
    ({"optim": "adam"}, "optim", "unknown_value", "adamw_torch"),
    ({"base_model": "../../etc/passwd"}, "base_model", "invalid_name", "not a path outside the models root"),
    ({"base_model": "/etc/passwd"}, "base_model", "outside_models_root", "points outside the models root"),
    ({"base_model": "tiny/../../x"}, "base_model", "invalid_name", "not a path outside the models root"),
    ({"base_model": ""}, "base_model", "out_of_range", "at least 1 character"),
    ({"base_model": None}, "base_model", "wrong_type", "string"),
    ({"method": "full", "load_in_8bit": True}, "load_in_8bit", "conflict", "trains all weights"),
    ({"method": "lora", "load_in_8bit": True}, "load_in_8bit", "conflict", "use method `qlora`"),
    ({"eval_steps": 5}, "eval_steps", "needs_eval_data", "eval_split"),
    ({"extra": {"momentum": 1}}, "extra.momentum", "unknown_field", "is not a field"),
]


class TestConfiguration(OnSharedApi):
    @pytest.mark.parametrize(("config", "field", "code", "says"), CONFIGS, ids=[json.dumps(it[0]) for it in CONFIGS])
    def test_each_mistake_has_its_field_code_and_sentence(
        self, api: ApiServer, engine: Engine, dataset: str, config: Any, field: str, code: str, says: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "org/model", **config}}
        error = only_error(refused(api, engine, body))
        assert error[:2] == (f"config.{field}", code)
        assert says in error[2]

    def test_all_mistakes_are_reported_at_once(self, api: ApiServer, engine: Engine) -> None:
        body = {
            "backend": "slurm",
            "experiment_id": new_id("exp"),
            "dataset_id": new_id("ds"),
            "eval_dataset_id": new_id("ds"),
            "config": {"epochs": -1, "lora_rank": 3, "method": "full", "lora_r": 4},
        }
        problem = refused(api, engine, body)
        assert problem["code"] == "invalid_request"
        assert {(error["field"], error["code"]) for error in problem["errors"]} == {
            ("backend", "unknown_backend"),
            ("experiment_id", "experiment_not_found"),
            ("dataset_id", "dataset_not_found"),
            ("eval_dataset_id", "dataset_not_found"),
            ("config.base_model", "missing"),
            ("config.epochs", "out_of_range"),
            ("config.lora_rank", "unknown_field"),
            ("config.lora_r", "conflict"),
            ("config.eval_steps", "needs_eval_steps"),
        }

    @pytest.mark.parametrize("literal", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
    def test_a_number_that_is_not_finite_is_refused(
        self, api: ApiServer, engine: Engine, dataset: str, literal: str
    ) -> None:
        text = json.dumps({"dataset_id": dataset, "config": {"base_model": "org/model", "learning_rate": 0}})
        answer = api.client.post(
            "/v1/runs",
            content=text.replace('"learning_rate": 0', f'"learning_rate": {literal}'),
            headers={"Content-Type": "application/json"},
        )
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "not_finite")
        assert count_runs(engine) == 0

    def test_options_of_the_fake_backend_are_its_own(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        body = {"backend": "fake", "dataset_id": dataset, "config": {"base_model": "any", "extra": {"step": 1}}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("config.extra.step", "unknown_field")
        assert "step_seconds" in says


class TestRequest(OnSharedApi):
    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"colour": "red"}, "colour"),
            ({"priority": "high"}, "priority"),
            ({"priority": 1001}, "priority"),
            ({"max_restarts": -1}, "max_restarts"),
            ({"tags": "demo"}, "tags"),
            ({"tags": [""]}, "tags.0"),
            ({"name": ""}, "name"),
            ({"name": "x" * 201}, "name"),
            ({"config": []}, "config"),
            ({"dataset_id": None}, "dataset_id"),
        ],
    )
    def test_a_bad_field_is_named(
        self, api: ApiServer, engine: Engine, dataset: str, change: dict[str, Any], field: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, **change}
        assert refused(api, engine, body)["errors"][0]["field"] == field

    def test_a_missing_dataset_says_how_to_make_one(self, api: ApiServer, engine: Engine) -> None:
        for missing in (new_id("ds"), "nonsense", "../x"):
            body = {"dataset_id": missing, "config": {"base_model": "org/model"}}
            field, code, says = only_error(refused(api, engine, body))
            assert (field, code) == ("dataset_id", "dataset_not_found")
            assert "POST /v1/datasets" in says

    def test_a_dataset_of_the_wrong_format_names_the_right_ones(self, api: ApiServer, engine: Engine) -> None:
        body = {"dataset_id": make_dataset(engine, "preference"), "config": {"base_model": "org/model"}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("dataset_id", "wrong_dataset_format")
        assert "`chat`" in says and "`preference`" in says

    def test_a_field_that_does_not_go_with_the_dataset_is_refused(self, api: ApiServer, engine: Engine) -> None:
        config = {"base_model": "org/model", "loss_on": "assistant"}
        body = {"dataset_id": make_dataset(engine, "text"), "config": config}
        assert only_error(refused(api, engine, body))[:2] == ("config.loss_on", "conflict")

    def test_the_effective_configuration_says_what_is_learned_from_a_dataset(
        self, api: ApiServer, engine: Engine
    ) -> None:
        add_worker(engine, backends=["celery"])
        make_model(api.settings, name="learned")
        used = {}
        for data_format in ("prompt_completion", "chat", "text"):
            body = {"dataset_id": make_dataset(engine, data_format), "config": {"base_model": "learned"}}
            check = api.client.post("/v1/runs/validate", json=body).json()
            assert check["errors"] == []
            used[data_format] = check["effective_config"]["loss_on"]
        assert used == {"prompt_completion": "completion", "chat": "all", "text": "all"}

    def test_dataset_of_one_row_cannot_be_split(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        with engine.begin() as connection:
            connection.execute(update(Dataset).where(Dataset.id == dataset).values(rows=1))
        body = {"dataset_id": dataset, "config": {"base_model": "org/model", "eval_split": 0.5, "eval_steps": 5}}
        assert only_error(refused(api, engine, body))[:2] == ("config.eval_split", "conflict")
        body["config"]["extra"] = {"data_source": {"type": "lake"}}
        assert api.client.post("/v1/runs/validate", json=body).json()["errors"] == []

    def test_an_unknown_backend_names_those_there_are(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        body = {"backend": "slurm", "dataset_id": dataset, "config": {"base_model": "org/model"}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("backend", "unknown_backend")
        assert "`celery`" in says and "`fake`" in says

    def test_a_body_that_is_no_json_is_refused(self, api: ApiServer) -> None:
        headers = {"Content-Type": "application/json"}
        for content in (b"{", b"", b"[1]", b'"x"', b"\xff", b'{"dataset_id": "a", "dataset_id": "b"}'):
            answer = api.client.post("/v1/runs", content=content, headers=headers)
            assert answer.status_code == 422, content
            assert answer.json()["detail"]


class TestBaseModel(OnSharedApi):
    def test_a_name_that_is_nowhere_says_where_it_was_looked_for(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "nowhere"}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("config.base_model", "model_not_found")
        assert str(api.settings.models_folder) in says and "run_…" in says and "owner/model" in says

    def test_a_folder_without_a_model_is_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        make_model(api.settings, "empty", file="notes.txt")
        body = {"dataset_id": dataset, "config": {"base_model": "empty"}}
        assert only_error(refused(api, engine, body))[:2] == ("config.base_model", "not_a_model")

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            ({"revision": "v1"}, "config.revision"),
            ({"method": "qlora", "base_model": "bare"}, "config.base_model"),
            ({"max_seq_length": 4096}, "config.max_seq_length"),
        ],
    )
    def test_what_a_local_model_cannot_do_is_refused_before_anything_starts(
        self, api: ApiServer, engine: Engine, dataset: str, config: dict[str, Any], field: str
    ) -> None:
        folder = make_model(api.settings, "small")
        (folder / "config.json").write_text('{"max_position_embeddings": 256}')
        (make_model(api.settings, "bare") / "model.safetensors").unlink()
        body = {"dataset_id": dataset, "config": {"base_model": "small", **config}}
        assert only_error(refused(api, engine, body))[:2] == (field, "conflict")
        scratch = {"dataset_id": dataset, "config": {"base_model": "bare", "method": "full"}}
        assert api.client.post("/v1/runs/validate", json=scratch).json()["valid"] is True

    @pytest.mark.parametrize(
        ("file", "config", "field"),
        [
            ({}, {"target_modules": ["q_proj", "bogus"]}, "target_modules"),
            ({}, {"method": "sft", "target_modules": ["layers.9.self_attn.q_proj"]}, "target_modules"),
            ({"hidden_size": -5}, {}, "base_model"),
            ({"num_attention_heads": "four"}, {"method": "full"}, "base_model"),
        ],
        ids=str,
    )
    def test_what_its_architecture_makes_impossible_is_refused(
        self, api: ApiServer, engine: Engine, dataset: str, file: Any, config: dict[str, Any], field: str
    ) -> None:
        (make_model(api.settings) / "config.json").write_text(json.dumps({**_LLAMA, **file}))
        body = {"dataset_id": dataset, "config": {"base_model": "tiny", **config}}
        error = only_error(refused(api, engine, body))
        assert error[:2] == (f"config.{field}", "conflict")

    @pytest.mark.parametrize(
        ("file", "config"),
        [
            ({}, {"target_modules": ["q_proj", "mlp.up_proj", "layers.1.self_attn.o_proj", "embed_tokens"]}),
            ({"model_type": "another"}, {"target_modules": ["bogus"]}),
            ({"model_type": "mixtral"}, {"target_modules": ["w1"]}),
            ({"model_type": "another", "hidden_size": -5}, {}),
            ({"num_key_value_heads": None, "intermediate_size": 64.0}, {}),
            ({"hidden_size": -5}, {"target_modules": ["bogus"], "extra": {"model_factory": {"type": "mine"}}}),
        ],
        ids=str,
    )
    def test_what_may_work_is_not_refused(
        self, api: ApiServer, dataset: str, file: dict[str, Any], config: dict[str, Any]
    ) -> None:
        (make_model(api.settings) / "config.json").write_text(json.dumps({**_LLAMA, **file}))
        body = {"dataset_id": dataset, "config": {"base_model": "tiny", **config}}
        assert api.client.post("/v1/runs/validate", json=body).json()["errors"] == []

    def test_weights_without_a_byte_are_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        (make_model(api.settings) / "model.safetensors").write_bytes(b"")
        body = {"dataset_id": dataset, "config": {"base_model": "tiny", "method": "full"}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("config.base_model", "conflict") and "is empty" in says

    def test_a_run_that_does_not_exist_is_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": new_id("run")}}
        assert only_error(refused(api, engine, body))[:2] == ("config.base_model", "base_run_not_found")


class TestBaseRun:
    def test_a_run_must_be_completed_and_the_answer_names_its_status(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        base = make_run(api.client, dataset)["id"]
        body = {"dataset_id": dataset, "config": {"base_model": base}}
        field, code, says = only_error(refused(api, engine, body))
        assert (field, code) == ("config.base_model", "base_run_not_completed")
        assert "pending" in says
        Trainer(engine, base).begin().fail()
        assert "failed" in only_error(refused(api, engine, body))[2]

    def test_a_completed_run_is_a_base_and_is_remembered_as_such(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        base = make_run(api.client, dataset)["id"]
        Trainer(engine, base).begin().complete().write_output(Storage(api.settings))
        built = make_run(api.client, dataset, backend="celery", config={"base_model": base})
        assert built["base_run_id"] == base
        assert run_row(engine, built["id"]).base_run_id == base


class TestExtraEvaluationSets(OnSharedApi):
    EVALUATED: dict[str, Any] = {"base_model": "any", "eval_split": 0.1, "eval_steps": 1}

    def test_each_is_checked_as_the_main_data_is(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        sets = {"code": dataset, "pairs": make_dataset(engine, "preference"), "gone": new_id("ds"), "loss": dataset}
        problem = refused(
            api, engine, {"dataset_id": dataset, "config": self.EVALUATED, "extra_eval_datasets": sets, **FAKE}
        )
        assert {(error["field"], error["code"]) for error in problem["errors"]} == {
            ("extra_eval_datasets.pairs", "wrong_dataset_format"),
            ("extra_eval_datasets.gone", "dataset_not_found"),
            ("extra_eval_datasets.loss", "reserved_name"),
        }

    @pytest.mark.parametrize(
        ("sets", "field", "says"),
        [
            (["Code"], "extra_eval_datasets.Code", "the name must match pattern '^[a-z0-9_]{1,32}$'"),
            ([""], "extra_eval_datasets.", "the name must match"),
            (["x" * 33], f"extra_eval_datasets.{'x' * 33}", "the name must match"),
            ([f"set_{n}" for n in range(17)], "extra_eval_datasets", "16"),
        ],
    )
    def test_names_are_short_and_few(
        self, sets: list[str], field: str, says: str, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        named = dict.fromkeys(sets, dataset)
        problem = refused(
            api, engine, {"dataset_id": dataset, "config": self.EVALUATED, "extra_eval_datasets": named, **FAKE}
        )
        (error,) = problem["errors"]
        assert error["field"] == field and says in error["message"]

    @pytest.mark.parametrize("config", [{}, {"eval_split": 0.0}])
    def test_there_must_be_data_that_decides(
        self, config: dict[str, Any], api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "any", **config}, "extra_eval_datasets": {"a": dataset}}
        error = only_error(refused(api, engine, {**body, **FAKE}))
        assert error[:2] == ("extra_eval_datasets", "needs_eval_data")
        assert "set `eval_dataset_id` or `eval_split`" in error[2]


class TestDefaultValues:
    """A value equal to the default counts as not given, so a client may send every field for every method."""

    IGNORED = {
        "full": {
            "lora_r", "lora_alpha", "lora_dropout", "load_in_4bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
        },
        "lora": {"load_in_4bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type"},
    }  # fmt: skip

    @pytest.mark.parametrize("method", METHODS)
    def test_the_specified_dictionary_is_accepted_for_every_method(
        self, api: ApiServer, engine: Engine, method: TrainingMethod
    ) -> None:
        add_worker(engine, backends=["celery"])
        (make_model(api.settings) / "config.json").write_text(json.dumps({**_LLAMA, "max_position_embeddings": 256}))
        config = SpecifiedConfig("tiny", method).to_dict()
        if METHODS[method].generates:
            config[method] = {"rewards": [{"type": "length", "max": 20}]}
        if METHODS[method].has_teacher:
            config[method] = {"teacher": "tiny", "max_completion_length": 64}
        body = {"dataset_id": make_dataset(engine, METHODS[method].formats[0]), "config": config}
        check = api.client.post("/v1/runs/validate", json=body).json()
        assert check["errors"] == []
        ignored = {it["field"].removeprefix("config.") for it in check["warnings"] if it["code"] == "equals_default"}
        assert ignored == self.IGNORED.get(method, set())
        created = api.client.post("/v1/runs", json=body)
        assert created.status_code == 202, created.text
        unusual = {it["field"] for it in check["warnings"] if it["code"] == "unusual_value"}
        # 2e-4 is the default of supervised methods with an adapter, and 10 times that of those without one.
        assert unusual == ({"config.learning_rate"} if METHODS[method].learning_rate.adapter < 2e-5 else set())
        assert created.json()["warnings"] == check["warnings"]
        shown = api.client.get(f"/v1/runs/{created.json()['id']}").json()
        assert shown["warnings"] == check["warnings"]
        effective = check["effective_config"]
        assert (effective["optim"], effective["max_seq_length"]) == ("adamw_8bit", 256)
        plain = {"base_model": "tiny", "method": method, "gradient_checkpointing": True}
        # What depends on the method is used as written.
        plain |= {name: config[name] for name in ("rlhf", "gkd", "learning_rate", "optim") if name in config}
        assert created.json()["config"] == TrainingConfig.model_validate(plain).model_dump(mode="json")
        assert "optim" not in run_row(engine, created.json()["id"]).user_set_fields

    def test_a_warning_names_the_conflict_that_any_other_value_would_be(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        config = {"base_model": "org/model", "load_in_4bit": True, "load_in_8bit": True, "dpo": {"beta": 0.1}}
        check = api.client.post("/v1/runs/validate", json={"dataset_id": dataset, "config": config}).json()
        ignored = {it["field"]: it["message"] for it in check["warnings"] if it["code"] == "equals_default"}
        assert set(ignored) == {"config.load_in_8bit", "config.dpo"}
        assert "equal to the default" in ignored["config.dpo"] and "only to method `dpo`" in ignored["config.dpo"]
        assert check["effective_config"]["load_in_4bit"] is False


class TestValidate(OnSharedApi):
    @pytest.mark.parametrize(
        ("files", "fields", "used"),
        [
            ({"config.json": {"max_position_embeddings": 256}}, {}, 256),
            ({"config.json": {"max_position_embeddings": 256}}, {"max_seq_length": 2048}, 256),
            ({"config.json": {"max_position_embeddings": 256}}, {"max_seq_length": None}, 256),
            ({"config.json": {"max_position_embeddings": 256}}, {"max_seq_length": 128}, 128),
            ({"config.json": {"max_position_embeddings": 8192}}, {}, 2048),
            ({"config.json": _LLAMA, "tokenizer_config.json": {"model_max_length": 512}}, {}, 512),
            ({"config.json": _LLAMA, "tokenizer_config.json": {"model_max_length": 1e30}}, {"max_seq_length": None},
             1_000_000),
            ({"config.json": _LLAMA, "tokenizer_config.json": {"model_max_length": math.inf}}, {"max_seq_length": None},
             1_000_000),
            ({"config.json": _LLAMA, "tokenizer_config.json": {"model_max_length": -math.inf}}, {}, 2048),
            ({"config.json": _LLAMA}, {"max_seq_length": None}, None),
        ],
        ids=str,
    )  # fmt: skip
    def test_the_effective_length_is_the_one_that_the_model_takes(
        self, api: ApiServer, dataset: str, files: Any, fields: dict[str, Any], used: int | None
    ) -> None:
        folder = make_model(api.settings)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        body = {"dataset_id": dataset, "config": {"base_model": "tiny", **fields}}
        check = api.client.post("/v1/runs/validate", json=body).json()
        assert check["effective_config"]["max_seq_length"] == used
        lowered = [it for it in check["warnings"] if it["field"] == "config.max_seq_length"]
        assert bool(lowered) == (fields.get("max_seq_length") == 2048), "only one that the request names"

    def test_validate_reports_what_create_would_and_creates_nothing(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "nowhere", "epochs": 0}}
        answer = api.client.post("/v1/runs/validate", json=body)
        assert answer.status_code == 200
        assert answer.json()["valid"] is False
        assert answer.json()["errors"] == refused(api, engine, body)["errors"]

    def test_validate_shows_resolved_defaults(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        config = {"base_model": "org/model", "method": "full"}
        answer = api.client.post("/v1/runs/validate", json={"dataset_id": dataset, "config": config}).json()
        assert answer["valid"]
        assert answer["effective_config"]["load_in_4bit"] is False
        assert answer["effective_config"]["lora_r"] is None
        assert count_runs(engine) == 0


class TestOtherTokenizer(OnSharedApi):
    @pytest.fixture
    def words(self, api: ApiServer) -> Any:
        """A function that makes a folder with a tokenizer of some tokens, and returns its name."""

        def make(tokens: int, name: str = "words") -> str:
            folder = api.settings.models_folder / name
            folder.mkdir(parents=True)
            vocabulary = {f"token {number}": number for number in range(tokens - 1)}
            added = [{"id": tokens - 1, "content": "<end>"}]
            content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added}
            (folder / "tokenizer.json").write_text(json.dumps(content))
            return name

        (make_model(api.settings) / "config.json").write_text(json.dumps({**_LLAMA, "vocab_size": 100}))
        return make

    def validated(self, api: ApiServer, dataset: str, tokenizer: str) -> list[tuple[str, str, str]]:
        body = {"dataset_id": dataset, "config": {"base_model": "tiny", "tokenizer": tokenizer}}
        check = api.client.post("/v1/runs/validate", json=body).json()
        return [(error["field"], error["code"], error["message"]) for error in check["errors"]]

    def test_tokenizer_with_as_many_tokens_as_the_model_is_accepted(
        self, api: ApiServer, dataset: str, words: Any
    ) -> None:
        assert self.validated(api, dataset, words(100)) == []

    def test_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_numbers(
        self, api: ApiServer, dataset: str, words: Any
    ) -> None:
        ((field, code, message),) = self.validated(api, dataset, words(101))
        assert (field, code) == ("config.tokenizer", "conflict")
        assert "ids up to 100" in message and "embeddings for 100 tokens" in message

    def test_missing_tokenizer_is_refused(self, api: ApiServer, dataset: str, words: Any) -> None:
        assert [error[:2] for error in self.validated(api, dataset, "nowhere")] == [
            ("config.tokenizer", "model_not_found")
        ]
        (api.settings.models_folder / "empty").mkdir()
        assert [error[:2] for error in self.validated(api, dataset, "empty")] == [
            ("config.tokenizer", "not_a_tokenizer")
        ]
        run = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"
        assert [error[:2] for error in self.validated(api, dataset, run)] == [("config.tokenizer", "not_supported")]


def test_layers_and_tokens_that_a_local_model_lacks_are_refused(api: ApiServer, engine: Engine, dataset: str) -> None:
    (make_model(api.settings) / "config.json").write_text(json.dumps({**_LLAMA, "vocab_size": 100}))
    config = {"base_model": "tiny", "layers_to_transform": [0, 2], "trainable_token_indices": [99, 100]}
    problem = refused(api, engine, {"dataset_id": dataset, "config": config})
    messages = {error["field"]: error["message"] for error in problem["errors"]}
    assert "2 layers, 0 to 1, and so no 2" in messages["config.layers_to_transform"]
    assert "100 tokens, 0 to 99, and so no 100" in messages["config.trainable_token_indices"]


def test_requests_are_served_while_a_configuration_is_validated(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = []
    judge = config_errors

    def judged(*arguments: Any, **more: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            inline.append(False)
        else:
            inline.append(True)
        return judge(*arguments, **more)

    monkeypatch.setattr(config, "config_errors", judged)
    with ThreadServer(settings) as api:
        engine = sync_engine(settings.database_url or "", pool_size=0)
        body = {"dataset_id": make_dataset(engine), "config": {"base_model": "org/model"}}
        engine.dispose()
        calls = [api.client.post("/v1/runs/validate", json=body), api.client.post("/v1/runs", json=body)]
        run = f"/v1/runs/{calls[-1].json()['id']}"
        calls += [api.client.post(f"{run}/stop"), api.client.post(f"{run}/resume", json={"from": "start"})]
    assert all(answer.is_success for answer in calls), [answer.text for answer in calls]
    assert len(inline) >= 3 and not any(inline)


def test_a_model_that_the_operator_does_not_allow_is_refused_and_the_allowed_ones_are_named(settings: Settings) -> None:
    with ThreadServer(settings.model_copy(update={"allowed_models": "qwen-*, meta/*"})) as api:
        engine = sync_engine(settings.database_url or "", pool_size=0)
        body = {"dataset_id": make_dataset(engine), "config": {"base_model": "evil/model", "method": "sft"}}
        field, code, message = only_error(refused(api, engine, body))
        assert (field, code) == ("config.base_model", "model_not_allowed")
        assert "`qwen-*`, `meta/*`" in message and "evil/model" in message
        upload = {"file": ("x.jsonl", b'{"text": "a"}\n')}
        answer = api.client.post("/v1/datasets", data={"tokenizer": "evil/model"}, files=upload)
        assert answer.json()["code"] == "model_not_allowed", "a tokenizer is a file of a model"
        engine.dispose()

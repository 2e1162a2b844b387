"""Methods `dpo`, `reward` and `rlhf` over the API: their datasets, and the reward models that runs learn from."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.infra.db import async_engine, session_maker, sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.creating.plan import RunPlan
from app.runs.creating.validation.request import lock_references
from app.tables.experiments import Experiment
from app.tables.runs import Run
from tests.factories import Trainer, count_runs, make_dataset, make_model, make_run
from tests.rows import run_row, waiting_for_locks
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def config(*models: str, **fields: Any) -> dict[str, Any]:
    """Of method `rlhf`, with these reward models."""
    rewards: list[dict[str, Any]] = [{"type": "length", "max": 20}]
    rewards += [{"type": "model", "model": model} for model in models]
    return {"base_model": "org/model", "method": "rlhf", "rlhf": {"rewards": rewards}, **fields}


def prompts(engine: Engine, *columns: str) -> str:
    return make_dataset(engine, "prompt", ["prompt", *columns])


def errors(api: ApiServer, dataset: str, config: dict[str, Any], **body: Any) -> dict[str, tuple[str, str]]:
    """Code and sentence of what `POST /v1/runs` finds wrong, by field; when it does, it has made nothing."""
    answer = api.client.post("/v1/runs/validate", json={"dataset_id": dataset, "config": config, **body})
    assert answer.status_code == 200, answer.text
    return {error["field"]: (error["code"], error["message"]) for error in answer.json()["errors"]}


def judge(api: ApiServer, engine: Engine, method: str = "reward") -> str:
    """A completed run of a method, with an output; answers its id."""
    run_id = make_run(api.client, make_dataset(engine, "preference"), config={"method": method})["id"]
    Trainer(engine, run_id).begin().complete().write_output(Storage(api.settings))
    return str(run_id)


class TestData:
    @pytest.mark.parametrize(
        ("method", "formats"),
        [
            ("qlora", {"chat", "prompt_completion", "text", "tokenized"}), ("dpo", {"preference"}),
            ("kto", {"rated"}), ("orpo", {"preference"}), ("simpo", {"preference"}),
            ("reward", {"preference"}), ("rlhf", {"prompt"}),
            ("gkd", {"chat", "prompt_completion"}),
        ],
    )  # fmt: skip
    def test_each_method_takes_its_own_formats_to_train_and_to_evaluate(
        self, api: ApiServer, engine: Engine, method: str, formats: set[str]
    ) -> None:
        run_config = {
            **(config() if method == "rlhf" else {"base_model": "org/model", "method": method}),
            **({"gkd": {"teacher": "org/teacher"}} if method == "gkd" else {}),
            "eval_steps": 5,
        }
        for name in ("chat", "prompt_completion", "text", "preference", "rated", "prompt", "tokenized"):
            dataset = make_dataset(engine, name)
            problems = errors(api, dataset, run_config, eval_dataset_id=dataset)
            assert set(problems) == (set() if name in formats else {"dataset_id", "eval_dataset_id"})
            assert all(code == "wrong_dataset_format" for code, _ in problems.values())

    def test_rewards_that_compare_need_answers(self, api: ApiServer, engine: Engine) -> None:
        compares = config(rlhf={"rewards": [{"type": "length", "max": 3}, {"type": "numeric_match"}]})
        code, says = errors(api, prompts(engine), compares)["dataset_id"]
        assert code == "no_answers" and "`numeric_match`" in says
        assert errors(api, prompts(engine, "answer"), compares) == {}
        assert errors(api, prompts(engine), config()) == {}

    @pytest.mark.parametrize("odd", [None, 3, {"rewards": 3}, {"rewards": [3, {"type": 3}, {"type": ["model"]}]}])
    def test_rewards_that_are_none_are_refused_as_such(self, api: ApiServer, engine: Engine, odd: Any) -> None:
        assert all(field.startswith("config.rlhf") for field in errors(api, prompts(engine), config(rlhf=odd)))


class TestWhichModelsScore:
    def test_a_run_must_be_there_completed_and_of_method_reward(self, api: ApiServer, engine: Engine) -> None:
        waiting = make_run(api.client, make_dataset(engine, "preference"), config={"method": "reward"})["id"]
        missing = new_id("run")
        problems = errors(api, prompts(engine), config(missing, waiting))
        assert {field: code for field, (code, _) in problems.items()} == {
            "config.rlhf.rewards.1.model": "reward_run_not_found",
            "config.rlhf.rewards.2.model": "reward_run_not_completed",
        }
        Trainer(engine, waiting).begin().complete().write_output(Storage(api.settings))
        other = judge(api, engine, "dpo")
        problems = errors(api, prompts(engine), config(other, waiting))
        assert {field: code for field, (code, _) in problems.items()} == {
            "config.rlhf.rewards.1.model": "not_a_reward_model"
        }
        assert "`dpo`" in problems["config.rlhf.rewards.1.model"][1]

    def test_reward_model_names_are_resolved_like_base_models(self, api: ApiServer, engine: Engine) -> None:
        (make_model(api.settings, "judge") / "config.json").write_text(
            '{"architectures": ["LlamaForSequenceClassification"]}'
        )
        (make_model(api.settings, "writer") / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        assert errors(api, prompts(engine), config("judge", "org/judge")) == {}
        problems = errors(api, prompts(engine), config("writer", "nowhere", "../judge"))
        assert {field: code for field, (code, _) in problems.items()} == {
            "config.rlhf.rewards.1.model": "not_a_reward_model",
            "config.rlhf.rewards.2.model": "model_not_found",
            "config.rlhf.rewards.3.model": "invalid_name",
        }

    def test_a_teacher_must_generate_text_with_the_tokens_of_the_base_model(
        self, api: ApiServer, engine: Engine
    ) -> None:
        def write(name: str, kind: str, *tokens: str) -> None:
            folder = make_model(api.settings, name)
            (folder / "config.json").write_text(json.dumps({"architectures": [f"LlamaFor{kind}"]}))
            vocabulary = {token: number for number, token in enumerate(tokens)}
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))

        def refused(teacher: str | None) -> str | None:
            run_config = {"base_model": "small", "method": "gkd", "gkd": {"teacher": teacher}}
            problems = errors(api, make_dataset(engine, "chat"), run_config)
            assert set(problems) <= {"config.gkd.teacher"}
            return problems["config.gkd.teacher"][0] if problems else None

        write("small", "CausalLM", "a", "b")
        write("large", "CausalLM", "a", "b", "c")
        write("foreign", "CausalLM", "b", "a")
        write("judge", "SequenceClassification", "a", "b")
        scorer, writer = judge(api, engine), judge(api, engine, "dpo")
        waiting = make_run(api.client, make_dataset(engine, "preference"), config={"method": "dpo"})["id"]
        assert refused("large") is None and refused(writer) is None
        assert refused(None) == "missing" and refused("nowhere") == "model_not_found"
        assert refused("foreign") == "other_tokenizer"
        assert refused("judge") == refused(scorer) == "not_a_teacher"
        assert refused(new_id("run")) == "teacher_run_not_found" and refused(waiting) == "teacher_run_not_completed"

    def test_the_operators_list_counts_for_them_too(self, settings: Settings) -> None:
        with ThreadServer(settings.model_copy(update={"allowed_models": "org/*"})) as api:
            engine = sync_engine(settings.database_url or "", pool_size=0)
            problems = errors(api, prompts(engine), config("evil/judge"))
            assert {field: code for field, (code, _) in problems.items()} == {
                "config.rlhf.rewards.1.model": "model_not_allowed"
            }

    @pytest.mark.parametrize(
        ("file", "content", "methods"),
        [
            ("config.json", '{"architectures": ["Qwen3ForSequenceClassification"]}', {"reward"}),
            ("adapter_config.json", '{"task_type": "SEQ_CLS"}', set()),
            ("adapter_config.json", '{"task_type": "CAUSAL_LM"}', {"qlora", "dpo", "reward", "rlhf"}),
            ("config.json", '{"architectures": 3}', {"qlora", "dpo", "reward", "rlhf"}),
        ],
    )
    def test_a_model_that_scores_is_no_base_for_one_that_writes(
        self, api: ApiServer, engine: Engine, file: str, content: str, methods: set[str]
    ) -> None:
        (make_model(api.settings, "base", file) / file).write_text(content)
        data = {"qlora": "chat", "dpo": "preference", "reward": "preference", "rlhf": "prompt"}
        for method, kind in data.items():
            fields = config() if method == "rlhf" else {"method": method}
            problems = errors(api, make_dataset(engine, kind), {**fields, "base_model": "base"})
            assert set(problems) == (set() if method in methods else {"config.base_model"}), method
            assert all("`rlhf.rewards`" in message for _, message in problems.values())


@pytest.mark.parametrize(
    ("architecture", "method", "is_warned"),
    [
        ("BertForMaskedLM", "qlora", True), ("BertForMaskedLM", "reward", False), ("LlamaForCausalLM", "qlora", False),
    ],
)  # fmt: skip
def test_masked_language_model_is_warned_of_where_texts_are_to_be_continued(
    api: ApiServer, engine: Engine, architecture: str, method: str, is_warned: bool
) -> None:
    (make_model(api.settings, "base") / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    dataset = make_dataset(engine, "preference" if method == "reward" else "chat")
    body = {"dataset_id": dataset, "config": {"base_model": "base", "method": method}}
    warnings = api.client.post("/v1/runs/validate", json=body).json()["warnings"]
    assert ("masked_model" in [warning["code"] for warning in warnings]) == is_warned


class TestQuantizedFiles:
    """A base whose config.json has a `quantization_config`."""

    def place(self, api: ApiServer, name: str, **described: Any) -> None:
        content = {"architectures": ["LlamaForCausalLM"], "quantization_config": described}
        (make_model(api.settings, name) / "config.json").write_text(json.dumps(content))

    def test_settings_that_they_contradict_are_refused(self, api: ApiServer, engine: Engine) -> None:
        self.place(api, "four", quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
        self.place(api, "gptq", quant_method="gptq", bits=4)
        data = make_dataset(engine, "text")
        assert errors(api, data, {"base_model": "four", "method": "qlora", "output": "merged"}) == {}
        for fields, place in (({"method": "lora"}, "method"), ({"load_in_8bit": True}, "load_in_8bit")):
            problems = errors(api, data, {"base_model": "four", **fields})
            assert {field: code for field, (code, _) in problems.items()} == {f"config.{place}": "conflict"}
            assert "4 bits (`bitsandbytes`)" in problems[f"config.{place}"][1]
        code, message = errors(api, data, {"base_model": "gptq"})["config.base_model"]
        assert code == "conflict" and "`gptq`" in message

    def test_the_effective_configuration_is_theirs(self, api: ApiServer, engine: Engine) -> None:
        self.place(api, "eight", quant_method="bitsandbytes", load_in_8bit=True)
        run_config = {"base_model": "eight", "method": "qlora", "load_in_4bit": True}
        body = {"dataset_id": make_dataset(engine, "text"), "config": run_config}
        answer = api.client.post("/v1/runs/validate", json=body).json()
        effective = answer["effective_config"]
        assert (effective["load_in_4bit"], effective["load_in_8bit"]) == (False, True)
        (warning,) = (one for one in answer["warnings"] if one["field"] == "config.load_in_4bit")
        assert warning["code"] == "replaced" and "8 bits" in warning["message"]

    def test_reward_model_that_cannot_be_loaded_is_refused(self, api: ApiServer, engine: Engine) -> None:
        for name, method in (("eight", {"load_in_8bit": True}), ("awq", {"quant_method": "awq"})):
            content = {"architectures": ["LlamaForSequenceClassification"], "quantization_config": method}
            (make_model(api.settings, name) / "config.json").write_text(json.dumps(content))
        problems = errors(api, prompts(engine), config("eight", "awq"))
        assert {field: code for field, (code, _) in problems.items()} == {
            "config.rlhf.rewards.2.model": "not_supported"
        }
        assert "`awq`" in problems["config.rlhf.rewards.2.model"][1]

    def test_quantized_model_can_be_evaluated(self, api: ApiServer, engine: Engine) -> None:
        self.place(api, "four", quant_method="bitsandbytes", load_in_4bit=True)
        self.place(api, "gptq", quant_method="gptq", bits=4)
        data = make_dataset(engine, "text")
        answer = api.client.post("/v1/runs/evaluate", json={"model": "four", "dataset_id": data})
        assert answer.status_code == 202, answer.text
        answer = api.client.post("/v1/runs/evaluate", json={"model": "gptq", "dataset_id": data})
        assert answer.status_code == 422 and "`gptq`" in answer.text


class TestTheyAreKept:
    def test_a_run_reports_which_it_learns_from_and_so_does_one_that_resumes_it(
        self, api: ApiServer, engine: Engine
    ) -> None:
        first, second = judge(api, engine), judge(api, engine)
        created = make_run(api.client, prompts(engine), config=config(second, first, second))
        assert created["reward_run_ids"] == [first, second]
        Trainer(engine, created["id"]).begin().fail()
        resumed = api.client.post(f"/v1/runs/{created['id']}/resume", json={"from": "start"}).json()
        assert resumed["reward_run_ids"] == [first, second]
        full = api.client.get("/v1/runs", params={"view": "full"}).json()["data"]
        listed = {run["id"]: run["reward_run_ids"] for run in full}
        assert listed == {first: [], second: [], created["id"]: [first, second], resumed["id"]: [first, second]}
        for learning in (resumed["id"], created["id"]):
            refused = api.client.delete(f"/v1/runs/{first}")
            assert (refused.status_code, refused.json()["code"]) == (409, "run_is_needed")
            assert learning in refused.json()["detail"]
            api.client.post(f"/v1/runs/{learning}/stop")
            assert api.client.delete(f"/v1/runs/{learning}").status_code == 204
        assert api.client.delete(f"/v1/runs/{first}").status_code == 204

    def test_reward_model_run_deleted_meanwhile_is_refused_as_missing(self, api: ApiServer, engine: Engine) -> None:
        run_id, dataset = judge(api, engine), prompts(engine)
        body = {"backend": "fake", "dataset_id": dataset, "config": config(run_id)}
        with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
            connection.execute(text("DELETE FROM runs WHERE id = :id"), {"id": run_id})
            answer = pool.submit(api.client.post, "/v1/runs", json=body)
            # The estimate of the run that is deleted may not be stored yet, and wait too.
            eventually(lambda: waiting_for_locks(engine) >= 1, what="it waits")
            connection.commit()
        assert answer.result().json()["code"] == "reward_run_not_found"
        assert count_runs(engine) == 0

    def test_creation_locks_runs_before_their_experiment_as_the_deletion_of_an_experiment_does(
        self, api: ApiServer, engine: Engine
    ) -> None:
        run = run_row(engine, judge(api, engine))
        named: dict[str, Any] = {"base_model": run.id}
        request = RunCreate(dataset_id=run.dataset_id, experiment_id=run.experiment_id, config=named)
        plan = RunPlan(
            backend="fake",
            config=TrainingConfig(**named),
            user_set_fields=frozenset(named),
            resources=Resources(),
            base_run_id=run.id,
        )

        async def lock() -> None:
            own = async_engine(api.settings.database_url or "", pool_size=1)
            async with session_maker(own)() as session:
                await lock_references(session, request, plan)
            await own.dispose()

        experiment = select(Experiment.id).where(Experiment.id == run.experiment_id)
        with ThreadPoolExecutor(1) as pool, engine.connect() as deletion:
            deletion.execute(select(Run.id).where(Run.id == run.id).with_for_update())
            locking = pool.submit(asyncio.run, lock())
            eventually(lambda: waiting_for_locks(engine) == 1, what="it waits")
            deletion.execute(experiment.with_for_update(nowait=True))
            deletion.rollback()
            locking.result(60)

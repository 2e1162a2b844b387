"""What the API knows of an operator's plugins: which worker has what, and which names are refused."""

from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts import plugins
from anneal.contracts.training_config.fields import TrainerOptions
from app.config import Settings
from tests.factories import make_dataset, make_model
from tests.rows import add_worker
from tests.server import ApiServer

HERE = {"optimizer": ["slow-sign"], "callback": ["tally"], "reward": ["brevity"], "scheduler": []}


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def check(api: ApiServer, engine: Engine) -> Any:
    make_model(api.settings)
    dataset, prompts = make_dataset(engine), make_dataset(engine, "prompt", ["prompt"])

    def validate(extra: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
        run_config = {"base_model": "tiny", "method": "lora", "extra": extra or {}, **config}
        body = {"dataset_id": prompts if run_config["method"] == "rlhf" else dataset, "config": run_config}
        answer = api.client.post("/v1/runs/validate", json=body)
        assert answer.status_code == 200, answer.text
        check_result: dict[str, Any] = answer.json()
        return check_result

    return validate


def errors(check_result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["field"], one["code"]) for one in check_result["errors"]]


def test_a_name_that_no_worker_has_is_refused_with_those_there_are(check: Any, engine: Engine) -> None:
    add_worker(engine, backends=["celery"], plugins=HERE)
    assert errors(check({"optimizer": {"type": "slow-sign", "memory": 0.5}})) == []
    result = check({"optimizer": {"type": "slow-sing"}, "scheduler": {"type": "x"}})
    named = ("optimizer", "scheduler")
    assert errors(result) == [(f"config.extra.{field}", "plugin_not_installed") for field in named]
    assert "'slow-sing', which no worker has installed; installed are: slow-sign" in result["errors"][0]["message"]
    assert "entry point of `anneal.schedulers`" in result["errors"][1]["message"]
    callbacks = [{"type": "tally", "end_at": 3}, {"type": "count"}]
    result = check({"tokenizer": {"type": "own"}, "callbacks": callbacks}, chat_template="loud")
    named = ("extra.tokenizer", "extra.callbacks.1", "chat_template")
    assert errors(result) == [(f"config.{field}", "plugin_not_installed") for field in named]
    assert errors(check(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")) == []
    rlhf: dict[str, Any] = {"rewards": [{"type": "plugin", "name": "brevity"}, {"type": "plugin", "name": "wit"}]}
    assert errors(check(method="rlhf", rlhf=rlhf)) == [("config.rlhf.rewards.1.name", "plugin_not_installed")]


def test_plugin_that_only_some_workers_have_is_a_warning(check: Any, engine: Engine) -> None:
    add_worker(engine, backends=["celery"], plugins=HERE)
    add_worker(engine, backends=["celery"], plugins={})
    result = check({"optimizer": {"type": "slow-sign"}})
    assert errors(result) == []
    (warning,) = [one for one in result["warnings"] if one["code"] == "plugin_not_everywhere"]
    assert "only 1 of 2 workers" in warning["message"]


def test_no_one_is_refused_where_no_worker_reports(check: Any, engine: Engine) -> None:
    """Without a worker the run waits for one; one of an earlier version told nothing."""
    assert errors(check({"optimizer": {"type": "slow-sign"}})) == []
    add_worker(engine, backends=["celery"])
    assert errors(check({"optimizer": {"type": "slow-sign"}})) == []


@pytest.mark.parametrize(
    ("extra", "more", "wrong"),
    [
        ({"optimizer": {"type": "slow-sign"}}, {"optim": "sgd"}, ("config.optim", "conflict")),
        (
            {"optimizer": {"type": "slow-sign"}, "adam_beta1": 0.5},
            {},
            ("config.extra.adam_beta1", "conflict"),
        ),
        ({"scheduler": {"type": "a"}}, {"lr_scheduler_type": "linear"}, ("config.lr_scheduler_type", "conflict")),
        ({"optimizer": "slow-sign"}, {}, ("config.extra.optimizer", "wrong_type")),
        ({"optimizer": {}}, {}, ("config.extra.optimizer.type", "missing")),
        ({"optimizer": {"type": "/etc/x.py"}}, {}, ("config.extra.optimizer.type", "invalid_name")),
        ({"optimizer": {"type": "a", "x": "y" * 9000}}, {}, ("config.extra.optimizer", "out_of_range")),
        ({"callbacks": {"type": "a"}}, {}, ("config.extra.callbacks", "wrong_type")),
        ({"callbacks": [{"type": "a"}, "b"]}, {}, ("config.extra.callbacks.1", "wrong_type")),
        ({"callbacks": [{"type": "a"}] * 11}, {}, ("config.extra.callbacks", "out_of_range")),
        ({"collator": {"type": "a"}}, {"method": "rlhf"}, ("config.extra.collator", "conflict")),
        ({"prune_fraction": 0.5}, {}, ("config.extra.prune_fraction", "conflict")),
        ({"prune_fraction": 1}, {"method": "full"}, ("config.extra.prune_fraction", "out_of_range")),
        ({}, {"chat_template": "a b"}, ("config.chat_template", "bad_template")),
        ({}, {"chat_template": ""}, ("config.chat_template", "out_of_range")),
        ({}, {"chat_template": "{{ x }}" * 5000}, ("config.chat_template", "out_of_range")),
        ({}, {"chat_template": ["{{ x }}"]}, ("config.chat_template", "wrong_type")),
    ],
)
def test_invalid_plugin_fields_are_refused(
    check: Any, extra: dict[str, Any], more: dict[str, Any], wrong: tuple[str, str]
) -> None:
    assert wrong in errors(check(extra, **more))


def test_each_worker_shows_what_it_has(api: ApiServer, engine: Engine) -> None:
    add_worker(engine, plugins=HERE)
    add_worker(engine)
    assert [one["plugins"] for one in api.client.get("/v1/workers").json()["data"]] == [None, HERE]


def test_the_other_kinds_are_fields_of_extra() -> None:
    assert plugins.PLUGINS.keys() - {"reward", "callback", "chat_template"} <= TrainerOptions.model_fields.keys()

"""Models of the hub that cannot be had are refused before a run, and those that a worker may have are not."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine

from app.base_models import sources
from app.config import Settings
from app.runs.creating.estimates import hub_config
from tests.app import hub_server
from tests.factories import make_dataset, make_model
from tests.rows import add_worker
from tests.server import ApiServer

_PATH = "/org/m/resolve/main/config.json"
_UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub_config._answers.clear()
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    hub_config._answers.clear()


def own_worker(api: ApiServer, engine: Engine) -> None:
    """A worker that looks for models where the API does, as that of `anneal up`."""
    add_worker(engine, backends=["celery"], model_sources=sources.source_fingerprint(api.settings))


def body(engine: Engine, **config: Any) -> dict[str, Any]:
    return {"dataset_id": make_dataset(engine), "config": {"base_model": "org/m", "method": "lora", **config}}


def validated(api: ApiServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = api.client.post("/v1/runs/validate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


_REFUSALS = {
    "offline": (None, "hub_offline", "HF_HUB_OFFLINE is set): put the model there"),
    "unreachable": (None, "hub_unreachable", "anneal models create tiny"),
    "missing": ((404, "RepoNotFound"), "hub_model_not_found", "correct the name"),
    "gated": ((403, "GatedRepo"), "hub_model_gated", "anneal secrets set hf_token"),
    "token": ((401, "Invalid credentials in Authorization header"), "hub_token_refused", "secrets delete hf_token"),
    "no-model": ((404, "EntryNotFound"), "hub_model_not_found", "has no config.json"),
    "revision": ((404, "RevisionNotFound"), "hub_revision_not_found", "no revision 'main'"),
}


@pytest.fixture(params=list(_REFUSALS))
def refused(
    request: pytest.FixtureRequest, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str, str]:
    """The hub does not give the model; return field, code and a part of the sentence."""
    refusal, code, says = _REFUSALS[request.param]
    if request.param == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif request.param == "unreachable":
        monkeypatch.setenv("HF_ENDPOINT", _UNREACHABLE)
    else:
        assert refusal is not None
        hub.refusals[_PATH] = refusal
    return "config.revision" if request.param == "revision" else "config.base_model", code, says


def test_model_that_the_hub_does_not_give_is_refused_where_no_worker_can_have_it(
    api: ApiServer, engine: Engine, refused: tuple[str, str, str]
) -> None:
    field, code, says = refused
    own_worker(api, engine)
    request = body(engine)
    (error,) = validated(api, request)["errors"]
    assert (error["field"], error["code"]) == (field, code) and says in error["message"]
    answer = api.client.post("/v1/runs", json=request)
    assert answer.status_code == 422 and answer.json()["code"] == code and says in answer.json()["detail"]
    assert api.client.get("/v1/runs").json()["data"] == []
    request["config"] |= {"base_model": make_model(api.settings).name}
    assert validated(api, request)["errors"] == [], "a folder needs no hub"


@pytest.mark.parametrize("others", ["none online", "elsewhere", "beside"])
def test_model_that_a_worker_may_have_on_its_machine_is_accepted_with_a_warning(
    api: ApiServer, engine: Engine, refused: tuple[str, str, str], others: str
) -> None:
    if others != "none online":
        add_worker(engine, backends=["celery"], model_sources=None if others == "elsewhere" else "0" * 64)
    if others == "beside":
        own_worker(api, engine)
    checked = validated(api, body(engine))
    assert checked["valid"]
    (warning,) = [one for one in checked["warnings"] if one["code"] == refused[1]]
    assert refused[2] in warning["message"] and "a worker that has the model on its machine" in warning["message"]


def test_model_that_the_hub_gives_is_accepted_and_checked_by_its_configuration(
    api: ApiServer, engine: Engine, hub: hub_server.Hub
) -> None:
    own_worker(api, engine)
    hub.files[_PATH] = json.dumps({"model_type": "llama"}).encode()
    request = body(engine)
    assert (validated(api, request)["errors"], validated(api, request)["warnings"]) == ([], [])
    assert hub.asked == [_PATH], "once for all requests"
    hub.files["/org/q/resolve/v1/config.json"] = json.dumps(
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    ).encode()
    (error,) = validated(api, body(engine, base_model="org/q", revision="v1"))["errors"]
    assert error["field"] == "config.base_model" and "GPTQ" in error["message"].upper()


def test_base_of_an_adapter_and_models_of_rewards_are_checked_as_base_models_are(
    api: ApiServer, engine: Engine, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", _UNREACHABLE)
    own_worker(api, engine)
    folder = make_model(api.settings, "adapter", "adapter_config.json")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/m"}))
    (error,) = validated(api, body(engine, base_model="adapter"))["errors"]
    assert error["code"] == "hub_unreachable" and "'org/m' of the adapter" in error["message"]
    make_model(api.settings, "org/m")
    assert validated(api, body(engine, base_model="adapter"))["errors"] == []
    rewards = {"rewards": [{"type": "model", "model": "org/judge"}]}
    request = body(engine, method="rlhf", rlhf=rewards) | {"dataset_id": make_dataset(engine, "prompt", ["prompt"])}
    (error,) = validated(api, request)["errors"]
    assert (error["field"], error["code"]) == ("config.rlhf.rewards.0.model", "hub_unreachable")


def test_hub_that_does_not_answer_delays_validations_shortly_and_nothing_else(
    api: ApiServer, engine: Engine, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_config, "_TIMEOUT_SECONDS", 2.0)
    hub.is_silent = True
    own_worker(api, engine)
    dataset = make_dataset(engine)
    names = [f"org/m{n}" for n in range(30)]  # more than the connections to the database

    def check(name: str) -> dict[str, Any]:
        return validated(api, {"dataset_id": dataset, "config": {"base_model": name, "method": "lora"}})

    with ThreadPoolExecutor(len(names) * 2) as threads:
        checks = [threads.submit(check, name) for name in names * 2]
        began = time.monotonic()
        while len(hub.asked) < len(names):
            assert time.monotonic() - began < 30
            assert api.client.get("/v1/runs").status_code == 200
        results = [one.result() for one in checks]
    assert all(one["valid"] and one["warnings"][0]["code"] == "hub_not_checked" for one in results)
    assert len(hub.asked) == len(names), "requests for one model share one download"
    assert check(names[0])["valid"] and len(hub.asked) == len(names), "a failure is kept for some seconds"

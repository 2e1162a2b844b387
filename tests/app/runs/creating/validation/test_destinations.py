"""Where a run is to send things is checked when it is asked for: what this server has no place for is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import make_model
from tests.rows import add_worker
from tests.server import ApiServer, ThreadServer

Ask = Callable[..., httpx.Response]


@pytest.fixture
def served(settings: Settings) -> Iterator[Callable[..., ApiServer]]:
    """Makes servers with these settings."""
    opened: list[ApiServer] = []

    def serve(**changes: Any) -> ApiServer:
        api = ThreadServer(settings.model_copy(update=changes))
        opened.append(api)
        api.__enter__()
        return api

    yield serve
    for api in opened:
        api.__exit__(None, None, None)


def ask(api: ApiServer, **config: Any) -> httpx.Response:
    """Ask for a run on a local model."""
    if not (api.settings.models_folder / "local").exists():
        make_model(api.settings, "local")
    rows = b'{"text": "a"}\n'
    dataset = api.client.post("/v1/datasets", files={"file": ("rows.jsonl", rows)}).json()["id"]
    body = {"dataset_id": dataset, "config": {"base_model": "local", "method": "lora", **config}}
    return api.client.post("/v1/runs", json=body)


def refused(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["field"] in ("config.report_to", "config.push_to_hub", "config.gguf")
    return error["code"], error["message"]


def test_mlflow_needs_a_server_that_the_operator_names(served: Callable[..., ApiServer]) -> None:
    code, message = refused(ask(served(), report_to=["mlflow"]))
    assert code == "tracker_not_set_up" and "ANNEAL_MLFLOW_TRACKING_URI" in message
    api = served(mlflow_tracking_uri="http://tracking.internal:5000")
    assert ask(api, report_to=["mlflow", "tensorboard"]).status_code == 202


def test_weights_and_biases_need_a_key_unless_nothing_is_sent(
    served: Callable[..., ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = served()
    code, message = refused(ask(api, report_to=["wandb"]))
    assert code == "tracker_not_set_up" and "`anneal secrets set wandb_api_key`" in message
    with monkeypatch.context() as offline:
        offline.setenv("WANDB_MODE", "offline")
        assert ask(api, report_to=["wandb"]).status_code == 202
    api.client.put("/v1/secrets/wandb_api_key", json={"value": "w" * 40})
    assert ask(api, report_to=["wandb"]).status_code == 202


def test_a_push_needs_the_hub_and_a_token(served: Callable[..., ApiServer]) -> None:
    code, message = refused(ask(served(allow_hub=False), push_to_hub="ada/tuned"))
    assert code == "hub_not_allowed" and "ANNEAL_ALLOW_HUB" in message
    api = served()
    code, message = refused(ask(api, push_to_hub="ada/tuned"))
    assert code == "hub_token_missing" and "anneal secrets set hf_token" in message
    api.client.put("/v1/secrets/hf_token", json={"value": "hf_" + "x" * 34})
    assert ask(api, push_to_hub="ada/tuned").status_code == 202


def test_a_gguf_file_needs_a_worker_with_its_programs(served: Callable[..., ApiServer], engine: Engine) -> None:
    api = served()
    # Without any worker, the run waits for one.
    assert ask(api, gguf="f16", output="merged").status_code == 202
    add_worker(engine, backends=["celery"])
    code, message = refused(ask(api, gguf="f16", output="merged"))
    assert code == "gguf_converter_missing" and "ANNEAL_GGUF_CONVERTER" in message and "QUANTIZER" not in message
    assert "ANNEAL_GGUF_QUANTIZER" in refused(ask(api, gguf="q4_k_m", output="merged"))[1]
    add_worker(engine, backends=["celery"], gguf=True)
    assert ask(api, gguf="f16", output="merged").status_code == 202
    code, message = refused(ask(api, gguf="Q4_K_M", output="merged"))
    assert code == "gguf_quantizer_missing" and "ANNEAL_GGUF_QUANTIZER" in message
    add_worker(engine, backends=["celery"], gguf=True, gguf_quantizer=True)
    assert ask(api, gguf="Q4_K_M", output="merged").status_code == 202


@pytest.mark.parametrize("name", ["tuned", "ada/", "/tuned", "ada/tuned/more", "https://hub/ada/tuned", "../ada"])
def test_invalid_repository_name_is_refused(name: str, served: Callable[..., ApiServer]) -> None:
    assert refused(ask(served(), push_to_hub=name))[0] == "invalid_name"


def test_a_resumed_run_may_ask_for_both_and_is_held_against_the_same(served: Callable[..., ApiServer]) -> None:
    api = served()
    run_id = ask(api).json()["id"]
    api.client.post(f"/v1/runs/{run_id}/stop", json={})
    changes = {"report_to": ["mlflow"], "push_to_hub": "ada/tuned"}
    answer = api.client.post(f"/v1/runs/{run_id}/resume", json={"from": "start", "config": changes})
    assert {error["code"] for error in answer.json()["errors"]} == {"tracker_not_set_up", "hub_token_missing"}
    answer = api.client.post(
        f"/v1/runs/{run_id}/resume", json={"from": "start", "config": {"report_to": ["tensorboard"]}}
    )
    assert answer.status_code == 202, answer.text


@pytest.mark.parametrize("uri", ["http://ada:word@tracking", "tracking:5000", "file:///data", "sqlite:///mlflow.db"])
def test_the_address_of_a_tracking_server_has_no_password_since_it_stands_in_job_files(uri: str) -> None:
    with pytest.raises(ValidationError, match="mlflow_tracking_token"):
        Settings(mlflow_tracking_uri=uri)

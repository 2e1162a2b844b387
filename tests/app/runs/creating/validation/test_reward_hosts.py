"""Rewards of requests call only hosts that the operator allows, and need the keys of these hosts."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from anneal.contracts.rewards import RewardHost
from app.config import Settings
from tests.factories import make_dataset, make_model
from tests.server import ApiServer, ThreadServer

HOSTS = {
    "reward_hosts": "API.example.com = judge_key, open.example.com",
    "reward_private_hosts": "10.1.2.3, ::1, [::2]:8000",
}


@pytest.fixture
def api(settings: Settings) -> Iterator[ApiServer]:
    with ThreadServer(settings.model_copy(update=HOSTS)) as api:
        make_model(api.settings, "local")
        yield api


def error_of(api: ApiServer, path: str, body: dict[str, Any]) -> tuple[str, str, str] | None:
    answer = api.client.post(path, json=body)
    if answer.status_code == 202:
        return None
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    return error["field"], error["code"], error["message"]


def test_reward_of_a_run_or_prediction_calls_an_allowed_host_with_its_key(api: ApiServer, engine: Engine) -> None:
    data = make_dataset(engine, "prompt", ["prompt"])

    def problem(url: str, *, predicts: bool = False) -> tuple[str, str] | None:
        rewards = [{"type": "http", "url": url}]
        if predicts:
            body = {"model": "local", "dataset_id": data, "config": {"rewards": rewards}}
            error = error_of(api, "/v1/runs/predict", body)
        else:
            config = {"base_model": "local", "method": "rlhf", "rlhf": {"rewards": rewards}}
            error = error_of(api, "/v1/runs", {"dataset_id": data, "config": config})
        if error is None:
            return None
        assert error[0] == ("config.rewards.0.url" if predicts else "config.rlhf.rewards.0.url")
        return error[1:]

    for predicts in (False, True):
        code, message = problem("https://scores.example.com/v1", predicts=predicts) or ("", "")
        assert code == "host_not_allowed" and "ask for scores.example.com in ANNEAL_REWARD_HOSTS" in message
    assert "ask for api.example.com:22 in" in (problem("https://api.example.com:22/v1") or ("", ""))[1]
    for other in ("https://open.example.com.evil.example", "http://10.1.2.30/x", "https://xopen.example.com"):
        assert (problem(other) or ("",))[0] == "host_not_allowed"
    for other in ("https://api.example.com:8443/v1", "http://[::2]", "http://10.1.2.3:8000", "https://[::2]:8001"):
        assert (problem(other) or ("",))[0] == "host_not_allowed"
    assert (problem("http://open.example.com") or ("",))[0] == "not_https"
    code, message = problem("https://api.example.com/v1") or ("", "")
    assert code == "reward_key_missing" and "`anneal secrets set judge_key`" in message
    api.client.put("/v1/secrets/judge_key", json={"value": "k" * 20})
    for url in (
        "https://api.example.com:443/v1",
        "https://OPEN.example.com",
        "http://10.1.2.3:80/x",
        "http://[::1]",
        "http://[::2]:8000",
    ):
        assert problem(url) is None, url
    assert problem("https://api.example.com/v1", predicts=True) is None


def test_settings_name_hosts_and_their_secrets() -> None:
    assert Settings(**HOSTS).allowed_reward_hosts == [  # type: ignore[arg-type]
        RewardHost(name="10.1.2.3", is_private=True),
        RewardHost(name="::1", is_private=True),
        RewardHost(name="::2", port=8000, is_private=True),
        RewardHost(name="api.example.com", secret="judge_key"),
        RewardHost(name="open.example.com"),
    ]
    assert Settings().allowed_reward_hosts == []
    for wrong in (
        "https://api.example.com",
        "api.example.com:0",
        "api.example.com:65536",
        "a:x",
        "api.example.com/v1",
        "*",
        "a=",
        "a=sk-Secret1",
    ):
        with pytest.raises(ValidationError, match="is not a host") as refused:
            Settings(reward_hosts=wrong)
        assert "sk-Secret1" not in str(refused.value.errors()[0]["msg"])

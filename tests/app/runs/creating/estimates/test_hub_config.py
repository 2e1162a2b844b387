"""A model of the hub is estimated from its config.json, without a download of its weights."""

import json
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from app.runs.creating.estimates import hub_config
from tests.app import hub_server
from tests.app.runs.creating.estimates.estimating import QWEN, estimated
from tests.factories import make_dataset, make_run
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    hub_config._answers.clear()
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    hub_config._answers.clear()


def test_a_hub_model_is_estimated_from_its_configuration_before_any_download(
    api: ApiServer, engine: Engine, hub: hub_server.Hub
) -> None:
    dataset = make_dataset(engine)
    hub.files["/org/qwen/resolve/v1/config.json"] = json.dumps(QWEN).encode()
    of_hub, local = (estimated(api, dataset, **named) for named in ({"base_model": "org/qwen", "revision": "v1"}, {}))
    assert of_hub["parameters"] == local["parameters"] and of_hub["memory_mb"] == local["memory_mb"]
    assert estimated(api, dataset, base_model="org/qwen", revision="v1")["memory_mb"] == local["memory_mb"]
    assert hub.asked == ["/org/qwen/resolve/v1/config.json"], "one small file, once"
    config = {"base_model": "org/qwen", "revision": "v1"}
    run = make_run(api.client, dataset, backend="celery", config=config)
    assert run["requirements"]["estimated_mb"] == {}
    read = eventually(lambda: api.client.get(f"/v1/runs/{run['id']}").json()["requirements"]["estimated_mb"])
    assert 4_000 < read["cuda"] < 16_000


@pytest.mark.parametrize(
    ("content", "redirect", "says"),
    [
        (None, None, "no model 'org/m' with a config.json"),
        (b"[" * 3_000_000, None, "more than 1,048,576 bytes"),
        (b"[1]", None, "is not a JSON object"),
        (b"{", None, "is not valid JSON"),
        (b"", "http://10.0.0.1/config.json", "private network address"),
    ],
    ids=["missing", "large", "list", "broken", "private"],
)
def test_a_hub_model_whose_configuration_cannot_be_read_is_not_guessed(
    api: ApiServer, engine: Engine, hub: hub_server.Hub, content: bytes | None, redirect: str | None, says: str
) -> None:
    path = "/org/m/resolve/main/config.json"
    if content is not None:
        hub.files[path] = content
    if redirect is not None:
        hub.redirects[path] = redirect
    estimate = estimated(api, make_dataset(engine), base_model="org/m")
    assert estimate["memory_mb"] is None and says in estimate["unknown"][0]["reason"]


def test_an_offline_hub_is_not_asked(
    api: ApiServer, engine: Engine, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    estimate = estimated(api, make_dataset(engine), base_model="org/m")
    assert "HF_HUB_OFFLINE is set" in estimate["unknown"][0]["reason"] and hub.asked == []

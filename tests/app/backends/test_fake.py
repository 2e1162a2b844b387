"""The `fake` backend: the same promises, without a model and with options of its own."""

import pytest
from sqlalchemy import Engine

from app.backends.celery import CeleryBackend
from app.config import Settings
from tests.app.backends.conformance import Conformance
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_worker
from tests.server import ThreadServer
from worker.context import WorkerContext


class TestFakeBackend(Conformance):
    name = "fake"
    config = {"base_model": "any-name-will-do", "extra": {"steps": 5, "step_seconds": 0}}
    wrong_config = {"epochs": -1, "extra": {"steps": 0, "max_grad_norm": 1.0}}

    async def test_fake_backend_runs_on_any_devices(self, backend: CeleryBackend, engine: Engine) -> None:
        add_worker(engine, backends=["fake"])
        assert await backend.validate_config({**self.config, "optim": "paged_adamw_32bit"}) == []


class TestWithoutTheSetting:
    """Any key that creates runs could otherwise make workers simulate faults."""

    def test_fake_backend_is_off_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ANNEAL_FAKE_BACKEND")
        assert Settings().fake_backend is False

    def test_disabled_fake_backend_is_not_listed_accepted_or_run(self, settings: Settings, engine: Engine) -> None:
        with ThreadServer(settings) as api:
            earlier = make_run(api.client, make_dataset(engine))["id"]
            Trainer(engine, earlier).begin().fail()
        settings = settings.model_copy(update={"fake_backend": False})
        with ThreadServer(settings) as api:
            assert [one["name"] for one in api.client.get("/v1/backends").json()["data"]] == ["celery", "ray"]
            assert api.client.get("/v1/backends/fake").status_code == 404
            body = {"backend": "fake", "dataset_id": make_dataset(engine), "config": {"base_model": "any"}}
            answer = api.client.post("/v1/runs", json=body)
            (error,) = [one for one in answer.json()["errors"] if one["field"] == "backend"]
            assert (answer.status_code, error["code"]) == (422, "unknown_backend") and "fake" not in error["message"]
            resumed = api.client.post(f"/v1/runs/{earlier}/resume", json={"from": "start"})
            assert resumed.status_code == 422 and resumed.json()["errors"][0]["code"] == "backend_not_configured"
            assert api.client.get(f"/v1/runs/{earlier}").json()["backend"] == "fake", "what is there stays readable"
            schema = api.client.get("/openapi.json").text
            assert '"fake"' not in schema and "FakeOptions" not in schema
        assert WorkerContext(settings).backends == ["celery"]

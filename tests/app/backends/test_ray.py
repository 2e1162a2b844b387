"""The `ray` backend: the promises of all backends, and its settings."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.schemas.runs.reads import TrainingRun
from app.backends.ray import RayBackend
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, session_maker
from app.infra.storage import Storage
from app.runs.events.stream import Streams
from tests.app.backends.conformance import Conformance
from tests.factories import Trainer, make_dataset, make_model
from tests.rows import add_worker
from tests.server import ApiServer, ThreadServer


class TestRayBackend(Conformance):
    name = "ray"
    config = {"base_model": "org/model"}
    wrong_config = {"epochs": -1, "extra": {"unheard_of": 1}}

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"ray_url": "http://ray-head:8265"})

    @pytest.fixture
    async def backend(self, settings: Settings, storage: Storage) -> AsyncIterator[RayBackend]:
        self.rounds = 0
        database = async_engine(settings.database_url or "")
        queue = Broker(settings)
        streams = Streams(database, queue)
        await queue.start()
        arguments = (BACKEND_RULES[self.name], session_maker(database), settings, storage, queue, streams)
        yield RayBackend(*arguments, wake=self._count)
        await streams.close()
        await queue.close()
        await database.dispose()

    async def test_a_new_run_and_a_stop_begin_a_round_of_the_loop(
        self, backend: RayBackend, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        assert self.rounds == 1
        await backend.stop(run_id)
        assert self.rounds == 2

    def _count(self) -> None:
        self.rounds += 1


class TestWithoutAUrl:
    def test_ray_backend_without_url_is_listed_unavailable_and_refused(self, api: ApiServer, engine: Engine) -> None:
        shown = {one["name"]: one["unavailable_reason"] for one in api.client.get("/v1/backends").json()["data"]}
        assert shown["celery"] is shown["fake"] is None and "ANNEAL_RAY_URL" in shown["ray"]
        body = {"backend": "ray", "dataset_id": make_dataset(engine), "config": {"base_model": "org/model"}}
        answer = api.client.post("/v1/runs", json=body)
        (error,) = [one for one in answer.json()["errors"] if one["field"] == "backend"]
        assert answer.status_code == 422 and error["code"] == "backend_not_configured"
        assert "ANNEAL_RAY_URL" in error["message"]

    def test_ray_run_is_not_resumed_without_url(self, settings: Settings, engine: Engine) -> None:
        configured = settings.model_copy(update={"ray_url": "http://127.0.0.1:1"})
        make_model(settings)
        body = {"backend": "ray", "dataset_id": make_dataset(engine), "config": {"base_model": "tiny"}}
        with ThreadServer(configured) as api:
            answer = api.client.post("/v1/runs", json=body)
            assert answer.status_code == 202, answer.text
        run_id = answer.json()["id"]
        trainer = Trainer(engine, run_id).begin()
        trainer.checkpoint(10)
        trainer.fail()
        with ThreadServer(settings) as api:
            answer = api.client.post(f"/v1/runs/{run_id}/resume", json={})
            assert answer.status_code == 422 and answer.json()["errors"][0]["code"] == "backend_not_configured"


class TestResources:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"ray_url": "http://127.0.0.1:1"})

    def test_any_number_of_devices_and_labels_of_nodes_are_accepted(self, api: ApiServer, engine: Engine) -> None:
        """The cluster may grow."""
        make_model(api.settings)
        body = {"backend": "ray", "dataset_id": make_dataset(engine), "config": {"base_model": "tiny"}}
        resources = {"devices": 64, "labels": ["ray.io/accelerator-type=H100"]}
        answer = api.client.post("/v1/runs", json={**body, "resources": resources})
        assert answer.status_code == 202, answer.text
        gpu = {"base_model": "tiny", "optim": "paged_adamw_32bit"}
        add_worker(engine, backends=["ray"])
        answer = api.client.post("/v1/runs", json={**body, "config": gpu})
        assert answer.status_code == 202, "nodes in use do not matter"
        answer = api.client.post("/v1/runs", json={**body, "resources": {"devices": "all"}})
        assert "backend `ray` starts a worker for each run; give the number" in answer.json()["errors"][0]["message"]
        answer = api.client.post("/v1/runs", json={**body, "resources": {"labels": ["site-b", "gpu="]}})
        assert [one["code"] for one in answer.json()["errors"]] == ["not_a_ray_label"] * 2

    def test_gpus_are_used_unless_cpus_are_asked_for(self, api: ApiServer, engine: Engine) -> None:
        """Also in a cluster that has none now: a run never moves to CPUs because its GPU node is gone."""
        make_model(api.settings)
        add_worker(engine, backends=["ray"])
        body = {"backend": "ray", "dataset_id": make_dataset(engine), "config": {"base_model": "tiny"}}
        kinds = {}
        for kind in (None, "cuda", "cpu"):
            answer = api.client.post("/v1/runs", json={**body, "resources": {"kind": kind}})
            assert answer.status_code == 202, answer.text
            kinds[kind] = answer.json()["requirements"]["kind"]
            assert "prefers_gpu" not in {name for name, value in answer.json()["requirements"].items() if value}
        assert kinds == {None: "cuda", "cuda": "cuda", "cpu": "cpu"}


class TestSettings:
    @pytest.mark.parametrize(
        "url", ["http://ray-head:8265", "https://[fe80::1]:8265", "HTTPS://Ray.example.com/team/a"]
    )
    def test_addresses_of_dashboards_are_accepted(self, url: str) -> None:
        assert Settings(ray_url=url).ray_url == url

    @pytest.mark.parametrize(
        "url",
        [
            "", "ray://ray-head:10001", "ray-head:8265", "file:///etc/passwd", "http://", "http://a b",
            "http://ada:hunter2@ray-head:8265", "http://hunter2@ray-head", "http://ray-head?token=hunter2",
            "http://ray-head/#hunter2", "http://ray-head\n:8265",
        ],
    )  # fmt: skip
    def test_invalid_ray_settings_are_refused_without_showing_a_token(self, url: str) -> None:
        with pytest.raises(ValidationError) as refused:
            Settings(ray_url=url)
        (error,) = refused.value.errors()
        assert error["loc"] == ("ray_url",) and "ANNEAL_RAY_TOKEN" in error["msg"] and "hunter2" not in error["msg"]

    def test_a_token_is_no_part_of_the_representation(self) -> None:
        assert "hunter2" not in repr(Settings(ray_url="http://ray-head:8265", ray_token="hunter2"))
        with pytest.raises(ValidationError):
            Settings(ray_token="hunter2\r\nX-Other: 1")

"""Workers and backends over the API."""

import pytest
from sqlalchemy import Engine

from anneal.contracts.methods import METHODS
from app.config import Settings
from app.workers import registry
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_run, add_worker, claim, hold_workers
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


class TestWorkers:
    def test_show_devices_launch_mode_and_what_each_runs(self, api: ApiServer, engine: Engine) -> None:
        run = make_run(api.client, make_dataset(engine))["id"]
        busy = Trainer(engine, run).worker_id
        idle = add_worker(engine, devices=2, host="other", launch_mode="cold", launch_reason="no probe")
        page = api.client.get("/v1/workers").json()
        first, second = page["data"]
        assert (first["id"], second["id"], page["has_more"]) == (idle, busy, False)
        assert (first["host"], first["slots"], first["runs"]) == ("other", 2, [])
        assert (first["launch_mode"], first["launch_reason"]) == ("cold", "no probe")
        assert [device["run_id"] for device in first["devices"]] == [None, None]
        assert (second["state"], second["runs"]) == ("online", [run])
        assert [(device["index"], device["kind"], device["run_id"]) for device in second["devices"]] == [
            (0, "cpu", run)
        ]
        assert second["heartbeat_at"].endswith("Z")

    def test_a_run_on_several_hosts_is_shown_with_each_of_them(self, api: ApiServer, engine: Engine) -> None:
        run = add_run(engine, devices_needed=2, hosts_needed=2).id
        lead, member = (add_worker(engine, group_address=f"10.0.0.{last}") for last in (1, 2))
        other = add_worker(engine)
        hold_workers(engine, run, lead, member)
        assert claim(engine, lead).id == run
        shown = {one["id"]: (one["joins_hosts"], one["runs"]) for one in api.client.get("/v1/workers").json()["data"]}
        assert shown == {lead: (True, [run]), member: (True, [run]), other: (False, [])}

    def test_ended_or_silent_worker_is_offline(self, api: ApiServer, engine: Engine) -> None:
        ended, silent, alive = (add_worker(engine) for _ in range(3))
        with engine.begin() as connection:
            connection.execute(registry.mark_offline([ended]))
            connection.exec_driver_sql(
                "UPDATE workers SET heartbeat_at = now() - interval '1 hour' WHERE id = %s", (silent,)
            )
        states = {worker["id"]: worker["state"] for worker in api.client.get("/v1/workers").json()["data"]}
        assert states == {ended: "offline", silent: "offline", alive: "online"}

    def test_workers_are_listed_in_pages(self, api: ApiServer, engine: Engine) -> None:
        worker_ids = [add_worker(engine) for _ in range(3)]
        page = api.client.get("/v1/workers", params={"limit": 2}).json()
        rest = api.client.get("/v1/workers", params={"after": page["data"][-1]["id"]}).json()
        assert [worker["id"] for worker in page["data"] + rest["data"]] == worker_ids[::-1]
        assert page["has_more"] and not rest["has_more"]


class TestBackends:
    def test_report_what_they_can_run(self, api: ApiServer) -> None:
        page = api.client.get("/v1/backends").json()
        assert [backend["id"] for backend in page["data"]] == ["celery", "fake", "ray"]
        celery = api.client.get("/v1/backends/celery").json()
        assert celery == page["data"][0]
        assert set(celery["supported_methods"]) == {*METHODS}
        assert celery["supported_quantization"] == ["4bit", "8bit"] and celery["supports_streaming_logs"]

    def test_report_the_largest_model_of_their_best_device(self, api: ApiServer, engine: Engine) -> None:
        def sizes() -> list[float | None]:
            return [backend["max_model_size_b"] for backend in api.client.get("/v1/backends").json()["data"]]

        assert sizes() == [None] * 3
        add_worker(engine, backends=["celery", "fake"], memory_mb=[1])
        assert sizes() == [0.0, None, None]
        add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[24_000, 81_559])
        largest, *others = sizes()
        assert others == [None, None] and largest is not None and 60 < largest < 150

    def test_an_unknown_one_is_a_404(self, api: ApiServer) -> None:
        answer = api.client.get("/v1/backends/slurm")
        assert (answer.status_code, answer.json()["code"]) == (404, "backend_not_found")

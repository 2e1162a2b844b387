"""Promises about experiments."""

import asyncio
import re

import pytest
from sqlalchemy import update

from app.config import Settings
from app.infra.db import async_engine, session_maker, sync_engine
from app.runs.creating.creation import DEFAULT_ID, default_experiment
from app.tables.runs import Run
from tests.factories import Trainer
from tests.rows import add_run
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def test_an_experiment_is_made_and_read_back(api: ApiServer) -> None:
    created = api.client.post("/v1/experiments", json={"name": "ranks", "description": "which?", "tags": ["a", "b"]})
    assert created.status_code == 201
    body = created.json()
    assert created.headers["location"] == f"/v1/experiments/{body['id']}"
    assert re.fullmatch(r"exp_[0-9a-z]{26}", body["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", body["created_at"])
    assert body["created_by"].startswith("key_")
    assert (body["name"], body["description"], body["tags"]) == ("ranks", "which?", ["a", "b"])
    assert api.client.get(created.headers["location"]).json() == body


def test_an_empty_experiment_has_all_counts_at_zero_and_no_best_run(api: ApiServer) -> None:
    body = api.client.post("/v1/experiments", json={"name": "x"}).json()
    assert set(body["runs"].values()) == {0} and len(body["runs"]) == 7
    assert body["best_runs"] == []
    assert body["checkpoints"] == body["models"] == 0
    assert api.client.delete(f"/v1/experiments/{body['id']}").status_code == 204


def test_runs_are_counted_by_status_and_the_best_is_named(api: ApiServer, settings: Settings) -> None:
    id = api.client.post("/v1/experiments", json={"name": "x"}).json()["id"]
    other = api.client.post("/v1/experiments", json={"name": "y"}).json()["id"]
    engine = sync_engine(settings.database_url or "", pool_size=0)

    def run(experiment_id: str, best_loss: float, best_score: float | None = None, method: str = "lora") -> Trainer:
        config = {"base_model": "none", "method": method}
        trainer = Trainer(engine, add_run(engine, experiment_id=experiment_id, config=config).id).begin()
        values = {"best_loss": best_loss, "best_score": best_score}
        with engine.begin() as connection:
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(**values))
        return trainer

    run(other, 0.1).complete()
    run(id, 2.5).complete()
    best = run(id, 1.5).complete().run_id
    run(id, 1.5).fail()
    run(id, -7e-9, method="rlhf").complete()
    rewarded = run(id, 0.5, -0.75, method="rlhf").complete().run_id
    run(id, 0.1, -0.25, method="rlhf").complete()
    evaluated = run(id, 2.5, 2.0, method="dpo").run_id
    run(id, 0.2, method="dpo").complete()
    add_run(engine, experiment_id=id)
    body = api.client.get(f"/v1/experiments/{id}").json()
    counts = {status: count for status, count in body["runs"].items() if count}
    assert counts == {"pending": 1, "running": 1, "completed": 6, "failed": 1} and body["models"] == 6
    assert body["best_runs"] == [
        {"run_id": best, "name": "a run", "method": "lora", "metric": "loss", "value": 1.5},
        {"run_id": evaluated, "name": "a run", "method": "dpo", "metric": "eval_loss", "value": 2.0},
        {"run_id": rewarded, "name": "a run", "method": "rlhf", "metric": "eval_reward", "value": 0.75},
    ]


def test_a_name_has_between_one_and_two_hundred_characters(api: ApiServer) -> None:
    for name in ("", "x" * 201):
        assert api.client.post("/v1/experiments", json={"name": name}).status_code == 422


def test_a_quota_is_changed_and_kept_by_a_key_that_writes_and_removed_by_null(api: ApiServer) -> None:
    assert api.client.post("/v1/experiments", json={"name": "x"}).json()["max_devices"] is None
    with api.client_with(api.key_with(["read", "write"])) as client:
        created = client.post("/v1/experiments", json={"name": "ranks", "max_devices": 4})
        path = created.headers["location"]
        for change, expected in (({"name": "y"}, 4), ({"max_devices": 0}, 0), ({"tags": None}, 0)):
            assert client.patch(path, json=change).json()["max_devices"] == expected
            assert client.get(path).json()["max_devices"] == expected
        assert client.get("/v1/experiments").json()["data"][0]["max_devices"] == 0
        assert client.patch(path, json={"max_devices": None}).json()["max_devices"] is None
        assert client.get(path).json() == {**created.json(), "name": "y", "max_devices": None}
    for wrong in (-1, 1_000_001, "4", True):
        for answer in (
            api.client.post("/v1/experiments", json={"name": "x", "max_devices": wrong}),
            api.client.patch(path, json={"max_devices": wrong}),
        ):
            assert answer.status_code == 422
            assert [one["field"] for one in answer.json()["errors"]] == ["max_devices"]


async def test_the_default_experiment_is_made_once_by_the_first_who_needs_it(settings: Settings) -> None:
    engine = async_engine(settings.database_url or "")
    sessions = session_maker(engine)

    async def first_run() -> str:
        async with sessions() as session, session.begin():
            return (await default_experiment(session, None)).id

    try:
        assert set(await asyncio.gather(*(first_run() for _ in range(10)))) == {DEFAULT_ID}
    finally:
        await engine.dispose()

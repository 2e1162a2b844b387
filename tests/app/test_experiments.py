"""Promises about experiments."""

import asyncio
import re

import psycopg
from psycopg.types.json import Jsonb

from app.config import Settings
from app.db import async_engine, session_maker
from app.experiments import service
from app.ids import new_id
from tests.server import ApiServer


def _run(settings: Settings, experiment_id: str, status: str, best_loss: float | None) -> str:
    """A row as the lifecycle would leave it, for what only looks at rows."""
    run_id, dataset_id = new_id("run"), new_id("ds")
    assert settings.database_url
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO datasets (id, name, format, extension, rows, bytes, sha256, columns, preview)"
            " VALUES (%s, 'd', 'text', 'jsonl', 1, 1, %s, '[]', '[]')",
            [dataset_id, "0" * 64],
        )
        connection.execute(
            "INSERT INTO runs (id, experiment_id, name, backend, dataset_id, config, given, status, best_loss,"
            " finished_at, stop_requested_at, error_code)"
            " VALUES (%(id)s, %(exp)s, 'r', 'fake', %(ds)s, %(config)s, '[]', %(status)s, %(loss)s,"
            " CASE WHEN %(status)s IN ('completed','failed','cancelled') THEN now() END,"
            " CASE WHEN %(status)s = 'cancelled' THEN now() END,"
            " CASE WHEN %(status)s = 'failed' THEN 'internal' END)",
            {"id": run_id, "exp": experiment_id, "ds": dataset_id, "config": Jsonb({}), "status": status,
             "loss": best_loss},
        )  # fmt: skip
    return run_id


def test_an_experiment_is_made_and_read_back(api: ApiServer) -> None:
    made = api.client.post("/v1/experiments", json={"name": "ranks", "description": "which?", "tags": ["a", "b"]})
    assert made.status_code == 201
    body = made.json()
    assert made.headers["location"] == f"/v1/experiments/{body['id']}"
    assert re.fullmatch(r"exp_[0-9a-z]{26}", body["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", body["created_at"])
    assert body["created_by"].startswith("key_")
    assert (body["name"], body["description"], body["tags"]) == ("ranks", "which?", ["a", "b"])
    assert api.client.get(made.headers["location"]).json() == body


def test_an_empty_experiment_has_all_counts_at_zero_and_no_best_run(api: ApiServer) -> None:
    body = api.client.post("/v1/experiments", json={"name": "x"}).json()
    assert set(body["runs"].values()) == {0} and len(body["runs"]) == 7
    assert body["best_run"] is None


def test_runs_are_counted_by_status_and_the_best_is_named(api: ApiServer, settings: Settings) -> None:
    id = api.client.post("/v1/experiments", json={"name": "x"}).json()["id"]
    other = api.client.post("/v1/experiments", json={"name": "y"}).json()["id"]
    _run(settings, other, "completed", 0.1)
    _run(settings, id, "pending", None)
    _run(settings, id, "completed", 2.5)
    best = _run(settings, id, "completed", 1.5)
    _run(settings, id, "failed", 1.5)
    body = api.client.get(f"/v1/experiments/{id}").json()
    counts = {status: count for status, count in body["runs"].items() if count}
    assert counts == {"pending": 1, "completed": 2, "failed": 1}
    assert body["best_run"] == {"run_id": best, "name": "r", "best_loss": 1.5}


def test_a_name_has_between_one_and_two_hundred_characters(api: ApiServer) -> None:
    for name in ("", "x" * 201):
        assert api.client.post("/v1/experiments", json={"name": name}).status_code == 422


async def test_the_default_experiment_is_made_once_by_whoever_comes_first(settings: Settings) -> None:
    engine = async_engine(settings.database_url or "")
    sessions = session_maker(engine)

    async def first_run() -> str:
        async with sessions() as session, session.begin():
            return (await service.default(session, None)).id

    try:
        assert set(await asyncio.gather(*(first_run() for _ in range(10)))) == {service.DEFAULT_ID}
    finally:
        await engine.dispose()

"""Promises of /healthz and /readyz."""

from importlib.metadata import version
from typing import Any

from redis import Redis

from app.config import Settings
from app.infra.ids import new_id
from app.tables import migrate
from tests.server import ApiServer, ThreadServer


def test_healthz_answers_without_a_key(api: ApiServer) -> None:
    answer = api.client_with(None).get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_readyz_says_that_database_schema_and_broker_are_there(api: ApiServer) -> None:
    answer = api.client.get("/readyz")
    assert answer.status_code == 200, answer.text
    expected = {"version": version("anneal"), "database": "ok", "migrations": migrate.needed_revision(), "broker": "ok"}
    assert answer.json() == expected


def test_readyz_needs_a_key(api: ApiServer) -> None:
    assert api.client_with(None).get("/readyz").status_code == 401


def test_readyz_names_a_broker_that_is_away(settings: Settings) -> None:
    away = settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    with ThreadServer(away) as api:
        answer = api.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["code"] == "not_ready"
    assert [item["field"] for item in answer.json()["errors"]] == ["broker"]
    assert answer.headers["retry-after"]


def test_readyz_names_a_broker_that_responds_and_refuses_writes(api: ApiServer, settings: Settings) -> None:
    """One at its memory limit answers a ping, and takes no hint."""
    with Redis.from_url(settings.redis_url or "", decode_responses=True) as redis:
        limit: Any = redis.config_get("maxmemory")
        redis.config_set("maxmemory", 1)
        try:
            answer = api.client.get("/readyz")
        finally:
            redis.config_set("maxmemory", limit["maxmemory"])
    assert answer.status_code == 503
    assert [item["field"] for item in answer.json()["errors"]] == ["broker"]
    assert "Redis refuses writes" in answer.json()["detail"] and "maxmemory" in answer.json()["detail"]
    assert api.client.get("/readyz").status_code == 200


def test_readyz_names_a_schema_of_another_version(settings: Settings) -> None:
    import psycopg

    with ThreadServer(settings) as api:
        assert settings.database_url
        with psycopg.connect(settings.database_url, autocommit=True) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '0000'")
        answer = api.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["errors"][0]["field"] == "migrations"
    assert "anneal migrate" in answer.json()["detail"]


def test_every_answer_has_an_id_of_its_own(api: ApiServer) -> None:
    ids = {
        api.client.get(path).headers["x-request-id"]
        for path in ("/healthz", "/v1/experiments", "/v1/nowhere", f"/v1/experiments/{new_id('exp')}")
    }
    assert len(ids) == 4

"""Nothing is told before it is true: answers, hints and requests to stop leave the API after their commit."""

from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.broker import Broker
from tests.factories import Trainer, count_runs, make_dataset, make_run
from tests.rows import run_row
from tests.server import ApiServer
from tests.waiting import eventually

_REFUSED_AT_COMMIT = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON runs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.fixture
def dataset_id(engine: Engine) -> str:
    return make_dataset(engine)


def refuse_commits(settings: Settings) -> None:
    """Every statement on a run succeeds from now on, and every commit of one fails."""
    with psycopg.connect(settings.database_url or "", autocommit=True) as connection:
        connection.execute(_REFUSED_AT_COMMIT)


def seen_at_calls(monkeypatch: pytest.MonkeyPatch, name: str, look: Any) -> list[Any]:
    """What `look` sees in the database at each call of this method of the queue."""
    seen: list[Any] = []

    async def call(self: Broker, *arguments: Any) -> None:
        seen.append(look(*arguments))

    monkeypatch.setattr(Broker, name, call)
    return seen


class TestAnAnswer:
    def test_acceptance_of_a_run_is_sent_after_its_commit(
        self, api: ApiServer, settings: Settings, engine: Engine, dataset_id: str
    ) -> None:
        refuse_commits(settings)
        body = {"backend": "fake", "dataset_id": dataset_id, "config": {"base_model": "any"}}
        answer = api.client.post("/v1/runs", json=body)
        assert answer.status_code == 500, answer.text
        assert count_runs(engine) == 0

    def test_acceptance_of_a_stop_is_sent_after_its_commit(
        self, api: ApiServer, settings: Settings, engine: Engine, dataset_id: str
    ) -> None:
        run_id = make_run(api.client, dataset_id)["id"]
        refuse_commits(settings)
        answer: httpx.Response = api.client.post(f"/v1/runs/{run_id}/stop")
        assert answer.status_code == 500, answer.text
        assert run_row(engine, run_id).stop_requested_at is None


class TestAHint:
    def test_workers_are_woken_after_the_run_can_be_claimed(
        self, api: ApiServer, engine: Engine, dataset_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs_seen = seen_at_calls(monkeypatch, "wake_workers", lambda *_: count_runs(engine))
        make_run(api.client, dataset_id)
        eventually(lambda: runs_seen, what="a hint")
        assert runs_seen[0] == 1, "a worker that came at once would have found nothing and gone away"


class TestARequestToStop:
    def test_stop_request_is_sent_to_the_worker_after_it_is_visible(
        self, api: ApiServer, engine: Engine, dataset_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = make_run(api.client, dataset_id)["id"]
        Trainer(engine, run_id).begin()
        stops_seen = seen_at_calls(monkeypatch, "call_worker", lambda id: run_row(engine, id).stop_requested_at)
        assert api.client.post(f"/v1/runs/{run_id}/stop").status_code == 202
        eventually(lambda: stops_seen, what="a message to the worker")
        assert stops_seen[0] is not None, "its renewal at once would have brought no stop"

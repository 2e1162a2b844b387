"""Renaming, pinning and deleting: what is needed stays, what goes goes whole."""

import contextlib
import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import OperationalError

from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.state import deletion
from app.tables.events import RunEvent
from app.tables.runs import MetricRollup, RunDeletion
from tests.factories import Trainer, make_dataset, make_experiment, make_run, mark_run
from tests.rows import add_run, learn_from, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=10)
    yield engine
    engine.dispose()


def trained(api: ApiServer, engine: Engine, **body: object) -> str:
    """A completed run with everything that a run leaves; answers its id."""
    trainer = Trainer(engine, make_run(api.client, make_dataset(engine), **body)["id"]).begin()
    for step in range(1, 40):
        trainer.metric(step, loss=1.0)
    trainer.checkpoint(40)
    trainer.complete().write_output(Storage(api.settings))
    return trainer.run_id


def left_of(engine: Engine, run_id: str) -> dict[str, int]:
    """How many rows there are of it, where."""
    tables = {"events": RunEvent, "curves": MetricRollup, "run_deletions": RunDeletion}
    in_feed = "SELECT count(*) FROM (TABLE event_feed UNION ALL TABLE event_feed_queue) AS f WHERE run_id = :id"
    with engine.connect() as connection:
        counts = {
            name: connection.scalar(select(func.count()).select_from(table).where(table.run_id == run_id)) or 0
            for name, table in tables.items()
        }
        counts["feed"] = connection.scalar(text(in_feed), {"id": run_id}) or 0
        for table in ("run_attempts", "checkpoints"):
            counts[table] = connection.scalar(text(f"SELECT count(*) FROM {table} WHERE run_id = :id"), {"id": run_id})
    return counts


class TestEdit:
    def test_name_tags_and_pin_change_and_what_is_left_out_stays(self, shared_api: ApiServer, engine: Engine) -> None:
        run = make_run(shared_api.client, make_dataset(engine), name="one", tags=["a"])
        path = f"/v1/runs/{run['id']}"
        edited = shared_api.client.patch(path, json={"name": "two", "pinned": True})
        assert edited.status_code == 200
        assert (edited.json()["name"], edited.json()["tags"], edited.json()["pinned"]) == ("two", ["a"], True)
        assert shared_api.client.patch(path, json={"tags": []}).json() == shared_api.client.get(path).json()
        assert shared_api.client.get(path).json()["tags"] == []
        for wrong in ({"status": "completed"}, {"name": ""}, {"pinned": "yes"}):
            assert shared_api.client.patch(path, json=wrong).status_code == 422
        shared_api.client.post(f"{path}/stop")

    def test_an_experiment_too(self, shared_api: ApiServer, engine: Engine) -> None:
        path = f"/v1/experiments/{make_experiment(engine)}"
        edited = shared_api.client.patch(path, json={"description": "why", "tags": ["t"]}).json()
        assert (edited["name"], edited["description"], edited["tags"]) == ("an experiment", "why", ["t"])
        assert shared_api.client.get(path).json() == edited
        assert shared_api.client.patch(f"/v1/experiments/{new_id('exp')}", json={}).status_code == 404

    def test_a_checkpoint_can_be_pinned_and_unpinned(self, shared_api: ApiServer, engine: Engine) -> None:
        run_id = trained(shared_api, engine)
        (listed,) = shared_api.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        path = f"/v1/runs/{run_id}/checkpoints/{listed['id']}"
        for pinned in (True, False):
            assert shared_api.client.patch(path, json={"pinned": pinned}).json()["pinned"] is pinned
            assert shared_api.client.get(path).json()["pinned"] is pinned
        assert shared_api.client.patch(path, json={}).status_code == 422


class TestDeleteRun:
    def test_everything_of_it_goes(self, shared_api: ApiServer, engine: Engine) -> None:
        run_id, other = trained(shared_api, engine), trained(shared_api, engine)
        folder = Storage(shared_api.settings).run_dir(run_id)
        before = left_of(engine, other)
        assert folder.is_dir() and left_of(engine, run_id)["events"] > 40 and left_of(engine, run_id)["feed"] == 5
        assert shared_api.client.delete(f"/v1/runs/{run_id}").status_code == 204
        assert shared_api.client.get(f"/v1/runs/{run_id}").status_code == 404
        assert shared_api.client.get(f"/v1/runs/{run_id}/events").status_code == 404
        eventually(lambda: not any(left_of(engine, run_id).values()) and not folder.exists())
        assert left_of(engine, other) == before
        assert shared_api.client.delete(f"/v1/runs/{run_id}").status_code == 404

    def test_run_that_has_not_ended_is_not_deleted(self, shared_api: ApiServer, engine: Engine) -> None:
        run = make_run(shared_api.client, make_dataset(engine))
        refused = shared_api.client.delete(f"/v1/runs/{run['id']}")
        assert (refused.status_code, refused.json()["code"]) == (409, "run_is_live")
        assert "pending" in refused.json()["detail"]
        shared_api.client.post(f"/v1/runs/{run['id']}/stop")
        assert shared_api.client.delete(f"/v1/runs/{run['id']}").status_code == 204

    def test_pinned_run_is_not_deleted(self, shared_api: ApiServer, engine: Engine) -> None:
        run_id = trained(shared_api, engine)
        mark_run(engine, run_id, pinned=True)
        assert shared_api.client.delete(f"/v1/runs/{run_id}").json()["code"] == "run_is_pinned"

    def test_run_with_pinned_checkpoint_is_not_deleted_until_unpinned(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        experiment = make_experiment(engine)
        run_id = trained(shared_api, engine, experiment_id=experiment)
        run, group = f"/v1/runs/{run_id}", f"/v1/experiments/{experiment}?cascade=true"
        (saved,) = shared_api.client.get(f"{run}/checkpoints").json()["data"]
        checkpoint = f"{run}/checkpoints/{saved['id']}"
        assert shared_api.client.patch(checkpoint, json={"pinned": True}).status_code == 200
        for path in (run, group):
            refused = shared_api.client.delete(path)
            assert refused.status_code == 409
            assert refused.json()["code"] == "checkpoint_is_pinned"
            assert saved["id"] in refused.json()["detail"]
        assert shared_api.client.get(checkpoint).json() == saved | {"pinned": True}
        assert shared_api.client.patch(checkpoint, json={"pinned": False}).status_code == 200
        assert shared_api.client.delete(run).status_code == 204

    def test_run_that_others_build_on_is_not_deleted_before_them(self, shared_api: ApiServer, engine: Engine) -> None:
        run_id = trained(shared_api, engine)
        resumed = shared_api.client.post(f"/v1/runs/{run_id}/resume", json={"from": "start"}).json()["id"]
        built = make_run(shared_api.client, make_dataset(engine))["id"]
        mark_run(engine, built, base_run_id=run_id)
        judged = make_run(shared_api.client, make_dataset(engine))["id"]
        learn_from(engine, judged, run_id)
        for needing in (resumed, built, judged):
            refused = shared_api.client.delete(f"/v1/runs/{run_id}")
            assert (refused.status_code, refused.json()["code"]) == (409, "run_is_needed")
            assert needing in refused.json()["detail"]
            shared_api.client.post(f"/v1/runs/{needing}/stop")
            assert shared_api.client.delete(f"/v1/runs/{needing}").status_code == 204
        assert shared_api.client.delete(f"/v1/runs/{run_id}").status_code == 204


class TestDeleteExperiment:
    def test_runs_are_deleted_with_their_experiment(self, shared_api: ApiServer, engine: Engine) -> None:
        experiment = make_experiment(engine)
        run_id = trained(shared_api, engine, experiment_id=experiment)
        # A run, its reward model and the one that resumed it go together, whichever of them is older.
        judge = trained(shared_api, engine, experiment_id=experiment)
        learn_from(engine, run_id, judge)
        learn_from(engine, trained(shared_api, engine, experiment_id=experiment), run_id)
        child = shared_api.client.post(f"/v1/runs/{run_id}/resume", json={"from": "start"}).json()["id"]
        refused = shared_api.client.delete(f"/v1/experiments/{experiment}?cascade=true")
        assert (refused.status_code, refused.json()["code"]) == (409, "experiment_is_live")
        assert child in refused.json()["detail"]
        shared_api.client.post(f"/v1/runs/{child}/stop")
        for query in ("", "?cascade=false"):
            refused = shared_api.client.delete(f"/v1/experiments/{experiment}{query}")
            assert (refused.status_code, refused.json()["code"]) == (409, "experiment_not_empty")
            counts = "4 runs (3 completed, 1 cancelled), 3 checkpoints and 3 models"
            assert counts in refused.json()["detail"] and "?cascade=true" in refused.json()["detail"]
        assert shared_api.client.get(f"/v1/runs/{run_id}").status_code == 200
        assert shared_api.client.delete(f"/v1/experiments/{experiment}?cascade=true").status_code == 204
        for gone in (f"/v1/experiments/{experiment}", f"/v1/runs/{run_id}", f"/v1/runs/{child}"):
            assert shared_api.client.get(gone).status_code == 404
        eventually(lambda: not any(left_of(engine, run_id).values()))

    def test_not_while_a_run_is_pinned_or_needed_elsewhere(self, shared_api: ApiServer, engine: Engine) -> None:
        experiment = make_experiment(engine)
        run_id = trained(shared_api, engine, experiment_id=experiment)
        mark_run(engine, run_id, pinned=True)
        path = f"/v1/experiments/{experiment}?cascade=true"
        assert shared_api.client.delete(path).json()["code"] == "run_is_pinned"
        mark_run(engine, run_id, pinned=False)
        elsewhere = add_run(engine, base_run_id=run_id).id
        refused = shared_api.client.delete(path).json()
        assert refused["code"] == "run_is_needed" and elsewhere in refused["detail"]
        shared_api.client.post(f"/v1/runs/{elsewhere}/stop")


class TestAtOnce:
    """Calls on what is being deleted wait for that, and then do not find it."""

    def test_resource_deleted_meanwhile_is_404(self, shared_api: ApiServer, engine: Engine) -> None:
        run_id = trained(shared_api, engine)
        path = f"/v1/runs/{run_id}"
        (saved,) = shared_api.client.get(f"{path}/checkpoints").json()["data"]
        calls: list[tuple[str, str, dict[str, object]]] = [
            ("PATCH", path, {"name": "x"}), ("POST", f"{path}/resume", {"from": "start"}), ("DELETE", path, {}),
            ("PATCH", f"{path}/checkpoints/{saved['id']}", {"pinned": True}),
        ]  # fmt: skip
        self.all_not_found(shared_api, engine, f"DELETE FROM runs WHERE id = '{run_id}'", calls)

    def test_experiment_with_pinned_checkpoint_is_not_deleted(self, shared_api: ApiServer, engine: Engine) -> None:
        id = make_experiment(engine)
        path = f"/v1/experiments/{id}"
        calls: list[tuple[str, str, dict[str, object]]] = [("PATCH", path, {"name": "x"}), ("DELETE", path, {})]
        self.all_not_found(shared_api, engine, f"DELETE FROM experiments WHERE id = '{id}'", calls)

    @staticmethod
    def all_not_found(
        api: ApiServer, engine: Engine, delete: str, calls: list[tuple[str, str, dict[str, object]]]
    ) -> None:
        with ThreadPoolExecutor(len(calls)) as pool, engine.connect() as connection:
            connection.execute(text(delete))
            answers = [pool.submit(api.client.request, method, path, json=body or None) for method, path, body in calls]
            eventually(lambda: waiting_for_locks(engine) == len(calls), what="all of them wait")
            connection.commit()
            assert [answer.result().status_code for answer in answers] == [404] * len(calls)

    @pytest.mark.parametrize(
        "error",
        [
            OSError("they are somebody else's"),
            RecursionError("a bug of ours"),
            OperationalError("DELETE", {}, psycopg.errors.DeadlockDetected("deadlock detected")),
            OperationalError("DELETE", {}, psycopg.errors.QueryCanceled("statement timeout")),
        ],
        ids=["no permission", "bug", "deadlock", "time limit"],
    )
    def test_files_that_cannot_be_removed_are_tried_again_and_those_of_other_runs_go(
        self, shared_api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        run_id, other_id = trained(shared_api, engine), trained(shared_api, engine)
        tried, remove_run = [], Storage.remove_run

        def refuse(storage: Storage, id: str) -> None:
            tried.append(id)
            if id == run_id:
                raise error
            remove_run(storage, id)

        with monkeypatch.context() as patched:
            patched.setattr(Storage, "remove_run", refuse)
            assert shared_api.client.delete(f"/v1/runs/{run_id}").status_code == 204
            eventually(lambda: run_id in tried)  # perhaps with what another deletion has left
            assert left_of(engine, run_id)["run_deletions"] == 1
            shared_api.client.delete(f"/v1/runs/{other_id}")
            eventually(lambda: not any(left_of(engine, other_id).values()))
            assert left_of(engine, run_id)["run_deletions"] == 1
        shared_api.client.delete(f"/v1/runs/{trained(shared_api, engine)}")
        eventually(lambda: not any(left_of(engine, run_id).values()))
        assert not Storage(shared_api.settings).run_dir(run_id).exists()

    def test_connection_stays_open_though_the_database_fails_after_the_answer(
        self, shared_api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_id = trained(shared_api, engine)

        async def fail(*_: object) -> int:
            raise OperationalError("DELETE", {}, psycopg.OperationalError("server closed the connection"))

        host, port = "127.0.0.1", shared_api.port
        with monkeypatch.context() as patched, contextlib.closing(http.client.HTTPConnection(host, port)) as connection:
            patched.setattr(deletion, "delete_remaining_data", fail)
            authorization = {"Authorization": f"Bearer {shared_api.key}"}
            connection.request("DELETE", f"/v1/runs/{run_id}", headers=authorization)
            answer = connection.getresponse()
            answer.read()
            socket = connection.sock
            connection.request("GET", "/v1/runs?limit=1", headers=authorization)
            assert (answer.status, connection.getresponse().status) == (204, 200)
            assert connection.sock is socket, "no second connection was opened"
        eventually(lambda: "was answered, but its task afterwards failed: The database" in caplog.text)
        shared_api.client.delete(f"/v1/runs/{trained(shared_api, engine)}")
        eventually(lambda: not any(left_of(engine, run_id).values()))

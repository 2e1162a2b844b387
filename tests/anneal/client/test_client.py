"""The Python client: one text for sync and async, typed answers, one exception, and no call made twice."""

import inspect
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine

from anneal.client.client import Anneal, AsyncAnneal
from anneal.client.connection import find_connection
from anneal.client.errors import AnnealError
from anneal.contracts.schemas.datasets import DatasetView
from anneal.contracts.schemas.runs.reads import RunFull
from anneal.settings import ClientSettings
from app.infra.db import sync_engine
from app.infra.home_lock import HomeLock
from app.infra.private_files import write_private_json
from app.infra.storage import Storage
from tests.factories import Trainer, make_dataset, mark_run
from tests.http_server import serving
from tests.server import ApiServer

ROWS = b"".join(b'{"text": "row %d"}\n' % n for n in range(5))


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def client(shared_api: ApiServer) -> Iterator[Anneal]:
    with Anneal(shared_api.url, shared_api.key) as client:
        yield client


@pytest.fixture
def trainer(client: Anneal, engine: Engine) -> Trainer:
    """A run that trains, the only one that waited."""
    for other in client.runs.list(status="pending"):
        client.runs.stop(other.id)
    return Trainer(engine, client.runs.create(body(make_dataset(engine))).id).begin()


def body(dataset_id: str, **more: Any) -> dict[str, Any]:
    return {"backend": "fake", "dataset_id": dataset_id, "config": {"base_model": "any", "method": "sft"}, **more}


class TestCalls:
    def test_uploaded_dataset_is_listed_and_shown(self, client: Anneal, tmp_path: Path) -> None:
        file = tmp_path / "rows.jsonl"
        file.write_bytes(ROWS)
        reported: list[int] = []
        uploaded = client.datasets.upload(file, name="five rows", on_progress=reported.append)
        assert (uploaded.name, uploaded.rows, uploaded.bytes) == ("five rows", 5, len(ROWS))
        assert reported[-1] == len(ROWS)
        assert next(iter(client.datasets.list())).id == uploaded.id
        assert client.datasets.get(uploaded.id).preview[0] == {"text": "row 0"}
        assert client.datasets.mix("twice", [{"dataset_id": uploaded.id}] * 2, seed=1).rows == 2 * uploaded.rows

    def test_a_pipe_is_uploaded_whole(self, client: Anneal, tmp_path: Path) -> None:
        pipe = tmp_path / "rows.jsonl"
        os.mkfifo(pipe)
        writing = threading.Thread(target=pipe.write_bytes, args=(ROWS,))
        writing.start()
        uploaded = client.datasets.upload(pipe)
        writing.join(10)
        assert (uploaded.rows, uploaded.bytes) == (5, len(ROWS))

    def test_a_list_goes_on_over_its_pages_and_ends_at_its_limit(self, client: Anneal, engine: Engine) -> None:
        dataset_id = make_dataset(engine)
        runs = [client.runs.create(body(dataset_id, tags=["paged"])).id for _ in range(3)]
        assert [run.id for run in client.runs.list(tag="paged")] == runs[::-1]
        assert [run.id for run in client.runs.list(tag="paged", limit=2)] == runs[:0:-1]
        assert [run.id for run in client.runs.list(tag="paged", after=runs[1])] == runs[:1]
        assert [run.id for run in client.runs.list(tag="paged", status="failed")] == []
        full = list(client.runs.list(tag="paged", full=True))
        assert [run.id for run in full] == runs[::-1]
        assert all(isinstance(run, RunFull) and run.config["base_model"] == run.base_model for run in full)
        for run_id in runs:
            assert client.runs.stop(run_id).status == "cancelled"

    def test_the_same_key_makes_the_same_run(self, client: Anneal, engine: Engine) -> None:
        dataset_id = make_dataset(engine)
        first = client.runs.create(body(dataset_id), idempotency_key="once")
        assert client.runs.create(body(dataset_id), idempotency_key="once").id == first.id
        assert client.runs.create(body(dataset_id)).id != first.id

    def test_arguments_left_out_are_not_sent(self, client: Anneal, engine: Engine) -> None:
        check = client.runs.validate(body(make_dataset(engine), config={"base_model": "any", "lora_r": 4}))
        assert check.valid and check.effective_config is not None
        assert check.effective_config["lora_r"] == 4

    def test_a_refusal_has_status_code_fields_and_the_id_of_the_request(self, client: Anneal) -> None:
        with pytest.raises(AnnealError) as refused:
            client.runs.create(body("ds_none", config={"base_model": "any", "lora_r": -1, "epochs": 0}))
        error = refused.value
        assert error.status == 422 and error.request_id is not None and error.request_id.startswith("req_")
        assert {"config.lora_r", "config.epochs", "dataset_id"} <= {item.field for item in error.errors}
        with pytest.raises(AnnealError, match=r"with `client\.runs\.list\(\)`"):
            client.runs.get("run_none")

    def test_update_sends_only_changed_fields(self, client: Anneal, engine: Engine) -> None:
        run = client.runs.create(body(make_dataset(engine), name="first", tags=["a"]))
        assert client.runs.update(run.id, name="better").tags == ["a"]
        assert client.runs.update(run.id, tags=[], pinned=True).name == "better"
        current = client.runs.get(run.id)
        assert (current.name, current.tags, current.pinned) == ("better", [], True)
        assert client.runs.update(run.id, pinned=False).pinned is False
        experiment = client.experiments.create("ranks", tags=["b"])
        changed = client.experiments.update(experiment.id, tags=[], description="why")
        assert (changed.name, changed.tags, changed.description) == ("ranks", [], "why")

    def test_a_quota_is_removed_by_none_and_kept_without_it(self, client: Anneal) -> None:
        experiment = client.experiments.create("ranks", max_devices=2)
        assert client.experiments.update(experiment.id, name="other").max_devices == 2
        assert client.experiments.update(experiment.id, max_devices=0).max_devices == 0
        assert client.experiments.update(experiment.id, max_devices=None).max_devices is None
        key = client.keys.create("laptop", max_devices=3)
        assert client.keys.update(key.id, name="tower").max_devices == 3
        changed = client.keys.update(key.id, max_devices=None)
        assert (changed.name, changed.max_devices) == ("tower", None)

    def test_deleted_resources_are_404(self, client: Anneal) -> None:
        dataset = client.datasets.upload(ROWS)
        assert b"".join(client.datasets.content(dataset.id)) == ROWS
        experiment = client.experiments.create("short")
        run = client.runs.create(body(dataset.id, experiment_id=experiment.id))
        with pytest.raises(AnnealError, match="stop"):
            client.runs.delete(run.id)
        client.runs.stop(run.id)
        for resource, id in ((client.runs, run.id), (client.experiments, experiment.id), (client.datasets, dataset.id)):
            resource.delete(id)
            with pytest.raises(AnnealError) as gone:
                resource.get(id)
            assert gone.value.status == 404

    def test_checkpoints_are_listed_and_pinned(self, client: Anneal, trainer: Trainer) -> None:
        ids = [trainer.checkpoint(step) for step in (1, 2)]
        assert client.runs.update_checkpoint(trainer.run_id, ids[0], pinned=True).pinned is True
        assert [(it.id, it.pinned) for it in client.runs.checkpoints(trainer.run_id)] == [
            (ids[1], False), (ids[0], True),
        ]  # fmt: skip

    def test_runs_are_compared_and_listed_best_first(self, client: Anneal, trainer: Trainer) -> None:
        trainer.metric(1, loss=2.0)
        mark_run(trainer.engine, trainer.run_id, best_loss=2.0)
        trainer.complete()
        other = client.runs.create(body(client.runs.get(trainer.run_id).dataset_id, name="other"))
        comparison = client.runs.compare([other.id, trainer.run_id])
        assert [run.name for run in comparison.runs] == ["other", client.runs.get(trainer.run_id).name]
        assert comparison.runs[1].metrics["loss"].last == 2.0 and comparison.common["config.base_model"] == "any"
        assert next(iter(client.runs.list(sort="best"))).id == trainer.run_id

    def test_a_model_is_downloaded_whole_or_not_at_all(
        self, client: Anneal, shared_api: ApiServer, trainer: Trainer, tmp_path: Path
    ) -> None:
        run = client.runs.get(trainer.run_id)
        output = trainer.write_output(Storage(shared_api.settings))
        (output / "weights").mkdir()
        (output / "weights" / "a b.safetensors").write_bytes(bytes(range(256)) * 1000)
        with pytest.raises(AnnealError, match="no output yet"):
            client.runs.download(run.id, tmp_path / "early")
        assert not (tmp_path / "early").exists()
        trainer.complete()

        # What an interrupted download has left is gone on with; the first bytes are not asked for again.
        part = tmp_path / "model" / f".{run.id}.part" / "weights"
        part.mkdir(parents=True)
        (part / "a b.safetensors").write_bytes(b"x" * 1000)
        folder = client.runs.download(run.id, tmp_path / "model")
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {"adapter_config.json", "weights/a b.safetensors"}
        content = (folder / "weights" / "a b.safetensors").read_bytes()
        assert content == b"x" * 1000 + (bytes(range(256)) * 1000)[1000:]

        chosen = client.runs.download(run.id, tmp_path / "chosen", paths=["*.json"])
        assert [path.name for path in chosen.iterdir()] == ["adapter_config.json"]
        with pytest.raises(AnnealError, match=r"Its files: adapter_config\.json"):
            client.runs.download(run.id, tmp_path / "none", paths=["*.bin"])

    async def test_the_async_client_answers_the_same(self, shared_api: ApiServer, client: Anneal) -> None:
        async with AsyncAnneal(shared_api.url, shared_api.key) as asynchronous:
            uploaded = await asynchronous.datasets.upload(ROWS, name="five rows")
            assert await asynchronous.datasets.get(uploaded.id) == client.datasets.get(uploaded.id)
            run = await asynchronous.runs.create(body(uploaded.id))
            await asynchronous.runs.stop(run.id)
            events = [event async for event in asynchronous.runs.events(run.id)]
            assert [event.model_dump() for event in events] == [it.model_dump() for it in client.runs.events(run.id)]
            assert events[-1].type == "end"
            assert [run async for run in asynchronous.runs.list(limit=1)] == list(client.runs.list(limit=1))

    def test_every_call_says_what_it_does_and_answers_a_model(self, client: Anneal) -> None:
        for resource in (client.runs, client.datasets, client.experiments, client.workers):
            names = [name for name in dir(resource) if not name.startswith("_") and name != "is_async"]
            assert names
            for name in names:
                method = getattr(resource, name)
                assert method.__doc__, name
                assert "self" not in inspect.signature(method).parameters
        assert isinstance(client.workers.list(), Iterator)
        assert issubclass(type(next(iter(client.datasets.list()))), BaseModel)


class TestConnection:
    def settings(self, home: Path, **values: str) -> ClientSettings:
        return ClientSettings(home=home, **values)  # type: ignore[arg-type]

    def test_arguments_override_the_environment_and_that_the_local_service(self, tmp_path: Path) -> None:
        local = {"url": "http://127.0.0.1:1", "api_key": "anneal_local", "pids": {}}
        write_private_json(tmp_path / "connection.json", local)
        with HomeLock(tmp_path):
            assert find_connection(self.settings(tmp_path)).key() == "anneal_local"
        there = self.settings(tmp_path, url="http://there:2/", api_key="anneal_there")
        connection = find_connection(there)
        assert (connection.url, connection.key()) == ("http://there:2", "anneal_there")
        assert find_connection(there, "http://else:3", "anneal_else").url == "http://else:3"

    def test_the_local_key_is_sent_nowhere_else(self, tmp_path: Path) -> None:
        write_private_json(tmp_path / "connection.json", {"url": "http://127.0.0.1:1", "api_key": "anneal_local"})
        with pytest.raises(AnnealError, match="set ANNEAL_API_KEY"):
            find_connection(self.settings(tmp_path, url="http://there:2"))
        with HomeLock(tmp_path):
            assert find_connection(self.settings(tmp_path, url="http://127.0.0.1:1/")).key() == "anneal_local"

    def test_the_local_key_is_sent_only_while_the_service_runs_and_is_that_of_its_last_start(
        self, failing: Anneal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        local = {"url": failing.url, "api_key": "anneal_first"}
        write_private_json(tmp_path / "connection.json", local)
        monkeypatch.setenv("ANNEAL_HOME", str(tmp_path))
        with pytest.raises(AnnealError, match="Start one with `anneal up`"):
            Anneal()
        Failing.answers = [(404, {}, b""), (404, {}, b"")]
        with HomeLock(tmp_path), Anneal(patience=0) as client:
            with pytest.raises(AnnealError, match="404"):
                client.runs.get("run_x")
            write_private_json(tmp_path / "connection.json", {**local, "api_key": "anneal_second"})
            with pytest.raises(AnnealError, match="404"):
                client.runs.get("run_x")
        assert Failing.keys == ["Bearer anneal_first", "Bearer anneal_second"]
        (tmp_path / "connection.json").rename(tmp_path / "later")
        with HomeLock(tmp_path), pytest.raises(AnnealError, match="is still starting: try again once"):
            Anneal()
        (tmp_path / "later").rename(tmp_path / "connection.json")
        # Another user of the machine listens on the port of a service that was killed, or was started on another port.
        with Anneal(failing.url, patience=0) as client:
            with pytest.raises(AnnealError, match="does not run or is still starting"):
                client.runs.get("run_x")
            write_private_json(tmp_path / "connection.json", {**local, "url": "http://127.0.0.1:1"})
            with HomeLock(tmp_path), pytest.raises(AnnealError, match="does not run or is still starting"):
                client.runs.get("run_x")
        assert len(Failing.keys) == 2

    @pytest.mark.parametrize(
        "url", ["there:8700", "ftp://there", "http://", "http://there:87x0", "http://[::1", "http://x:99999"]
    )
    def test_an_address_that_is_none_is_reported(self, url: str, tmp_path: Path) -> None:
        with pytest.raises(AnnealError, match="not a valid URL of a service"):
            find_connection(self.settings(tmp_path, url=url, api_key="anneal_x"))

    def test_a_key_is_not_shown(self, tmp_path: Path) -> None:
        assert "hidden" not in repr(find_connection(self.settings(tmp_path, url="http://x:1", api_key="hidden")))


class Failing(BaseHTTPRequestHandler):
    """Answers what `answers` holds, one after the other; writes down what was asked."""

    answers: list[tuple[int, dict[str, str], bytes]] = []
    requests: list[tuple[str, str, str | None]] = []
    keys: list[str | None] = []
    bodies: list[bytes] = []

    def do_GET(self) -> None:
        Failing.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        Failing.requests.append((self.command, self.path, self.headers.get("Idempotency-Key")))
        Failing.keys.append(self.headers.get("Authorization"))
        status, headers, content = Failing.answers.pop(0)
        if status == 0:
            return  # the connection breaks, and nobody knows what happened
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def failing() -> Iterator[Anneal]:
    """A client of a service that is not well."""
    Failing.answers, Failing.requests, Failing.bodies, Failing.keys = [], [], [], []
    with serving(Failing) as url, Anneal(url, "key", patience=5) as client:
        yield client


EMPTY = (200, {}, b'{"data": [], "has_more": false}')
BROKEN = (0, {}, b"")
BUSY = (503, {"Retry-After": "0", "Content-Type": "application/problem+json"}, b'{"code": "database_unavailable"}')


class TestTryingAgain:
    @pytest.mark.parametrize("trouble", [BROKEN, BUSY, (502, {}, b"Bad Gateway"), (429, {"Retry-After": "1"}, b"")])
    def test_reading_is_tried_again(self, failing: Anneal, trouble: Any) -> None:
        Failing.answers = [trouble, EMPTY]
        assert list(failing.workers.list()) == []
        assert len(Failing.requests) == 2

    def test_a_run_is_asked_for_again_with_the_same_key(self, failing: Anneal) -> None:
        Failing.answers = [BROKEN, BUSY, (422, {}, b'{"code": "invalid_request", "detail": "No."}')]
        with pytest.raises(AnnealError) as refused:
            failing.runs.create({"dataset_id": "ds_1"})
        assert (refused.value.status, refused.value.code, str(refused.value)) == (422, "invalid_request", "No.")
        keys = {key for _, _, key in Failing.requests}
        assert len(Failing.requests) == 3 and len(keys) == 1 and None not in keys

    def test_an_upload_is_sent_again_from_its_beginning(self, failing: Anneal) -> None:
        Failing.answers = [BROKEN, (422, {}, b'{"code": "bad_rows", "detail": "Row 1."}')]
        with pytest.raises(AnnealError, match="Row 1"):
            failing.datasets.upload(ROWS)
        assert len({key for _, _, key in Failing.requests}) == 1 and len(Failing.requests) == 2

    def test_an_upload_that_breaks_late_has_all_patience_left(self) -> None:
        Failing.answers, Failing.requests = [BROKEN, (422, {}, b'{"code": "bad_rows", "detail": "Row 1."}')], []

        def slowly(_: int) -> None:
            threading.Event().wait(0.2)

        with (
            serving(Failing) as url,
            Anneal(url, "key", patience=0.3) as client,
            pytest.raises(AnnealError, match="Row 1"),
        ):
            client.datasets.upload(ROWS, on_progress=slowly)
        assert len(Failing.requests) == 2

    def test_an_answer_that_breaks_off_is_asked_for_again(self, failing: Anneal) -> None:
        dataset = json.dumps(DatasetView.model_config["json_schema_extra"]["example"]).encode()  # type: ignore[index,call-overload]
        cut = (200, {"Content-Length": "999"}, b'{"data": [')
        Failing.answers = [cut, EMPTY, cut, (201, {}, dataset)]
        assert list(failing.workers.list()) == []
        assert failing.datasets.upload(ROWS).name == "docstrings.jsonl"
        assert len(Failing.requests) == 4 and Failing.requests[2] == Failing.requests[3]

    def test_an_answer_that_breaks_off_after_what_cannot_be_repeated_is_reported(self, failing: Anneal) -> None:
        Failing.answers = [(201, {"Content-Length": "999"}, b'{"id": ')]
        with pytest.raises(AnnealError, match="may or may not have been executed"):
            failing.experiments.create("once")
        assert len(Failing.requests) == 1

    def test_request_that_may_have_succeeded_is_not_repeated(self, failing: Anneal) -> None:
        Failing.answers = [BROKEN, EMPTY]
        with pytest.raises(AnnealError, match="may or may not have been executed"):
            failing.experiments.create("once")
        assert len(Failing.requests) == 1

    def test_patience_ends(self, failing: Anneal) -> None:
        Failing.answers = [(503, {"Retry-After": "60"}, b"")]
        with pytest.raises(AnnealError) as refused:
            next(iter(failing.runs.list()))
        assert refused.value.status == 503 and len(Failing.requests) == 1

    def test_a_service_that_is_not_there_is_reported(self) -> None:
        with (
            Anneal("http://127.0.0.1:1", "key", patience=0) as client,
            pytest.raises(AnnealError, match="is unreachable") as refused,
        ):
            client.runs.get("run_1")
        assert refused.value.status is None and refused.value.code == "unreachable"

    def test_a_path_outside_the_folder_is_refused(self, failing: Anneal, tmp_path: Path) -> None:
        listed = b'{"data": [{"path": "../evil", "bytes": 1}], "has_more": false}'
        Failing.answers = [(200, {}, listed)]
        with pytest.raises(AnnealError, match="outside the target folder"):
            failing.runs.download("run_1", tmp_path / "model")

    def test_content_that_breaks_off_is_reported(self, failing: Anneal) -> None:
        Failing.answers = [BUSY, (200, {"Content-Length": "999"}, ROWS)]
        with pytest.raises(AnnealError, match="was lost"):
            list(failing.datasets.content("ds_1"))

    def test_something_else_than_anneal_is_reported(self, failing: Anneal) -> None:
        Failing.answers = [(200, {"Content-Type": "text/html"}, b"<html>")] * 2
        with pytest.raises(AnnealError, match="is the URL of an Anneal service") as refused:
            failing.runs.get("run_1")
        assert refused.value.code == "unexpected_answer"
        with pytest.raises(AnnealError, match="is the URL of an Anneal service"):
            list(failing.runs.events("run_1"))

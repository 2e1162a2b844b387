"""The client's event stream: every event once and in order, whatever happens to the connection or the service."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.client import event_stream
from anneal.client.client import Anneal, AsyncAnneal
from anneal.client.errors import AnnealError
from anneal.contracts.events import EndEvent, Event, LogEvent, MetricEvent, StatusEvent
from app.api_keys.service import list_keys_sync, revoke_key_sync
from app.config import Settings
from app.runs.events import stream
from tests.factories import Trainer, make_dataset, make_run
from tests.http_server import serving
from tests.server import ApiServer, ProcessServer
from tests.stack import WorkerProcess
from tests.waiting import eventually

LAST = 6


class Streams(BaseHTTPRequestHandler):
    """Sends two events after the cursor and hangs up; what else it does is in the name of the run."""

    cursors: list[str | None] = []

    def do_GET(self) -> None:
        cursor = self.headers.get("Last-Event-ID")
        self.cursors.append(cursor)
        after = int(cursor or 0)
        if "run_none" in self.path:
            self._answer(
                404, "application/problem+json", b'{"code": "run_not_found", "detail": "There is no such run."}'
            )
        elif "run_revoked" in self.path and after:
            self._answer(401, "application/problem+json", b'{"detail": "This key is revoked."}')
        elif "run_away" in self.path and len(self.cursors) == 2:
            self._answer(503, "text/plain", b"")
        elif after == LAST:
            self._answer(204, "text/plain", b"")
        elif "run_gap" in self.path:
            self._answer(200, "text/event-stream", _frames(1, 3))
        elif "run_again" in self.path:
            self._answer(200, "text/event-stream", _frames(1, 2, 2))
        elif "run_kept" in self.path:
            # Nothing that is wanted, but the position; then half an event.
            torn = b"event: metric\ndata: {"
            position = b'id: %d\nevent: cursor\ndata: {"run_id": "run_kept", "seq": %d}\n\n' % (after + 3, after + 3)
            self._answer(200, "text/event-stream", b": keep-alive\n" + position + torn, missing=99)
        elif "run_quiet" in self.path and len(self.cursors) < 3:
            self._answer(200, "text/event-stream", b"retry: 2000\n: keep-alive\n", missing=99)
        else:
            # A length that is not reached: the connection breaks in mid-stream.
            self._answer(200, "text/event-stream", b"retry: 2000\n" + _frames(after + 1, after + 2), missing=99)

    def _answer(self, status: int, kind: str, body: bytes, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status != 204:
            self.send_header("Content-Length", str(len(body) + missing))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


def _frames(*seqs: int) -> bytes:
    return b"".join(
        b'id: %d\nevent: metric\ndata: {"run_id": "run_1", "seq": %d, "step": %d}\n\n' % (seq, seq, seq) for seq in seqs
    )


@pytest.fixture
def client() -> Iterator[Anneal]:
    """A client of a service that hangs up."""
    Streams.cursors = []
    with serving(Streams) as url, Anneal(url, "key") as client:
        yield client


class TestConnections:
    def test_a_lost_connection_is_taken_up_after_the_last_event_seen(self, client: Anneal) -> None:
        assert [event.seq for event in client.runs.events("run_cut")] == list(range(1, LAST + 1))
        assert Streams.cursors == [None, "2", "4", "6"]

    def test_a_service_that_is_away_for_a_moment_is_waited_for_and_reported(
        self, client: Anneal, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert [event.seq for event in client.runs.events("run_away")] == list(range(1, LAST + 1))
        assert Streams.cursors == [None, "2", "2", "4", "6"]
        (reported,) = [record.getMessage() for record in caplog.records if record.name == "anneal.client.event_stream"]
        assert "503" in reported and "Retrying" in reported

    def test_an_event_that_is_missing_is_reported_and_not_skipped(self, client: Anneal) -> None:
        with pytest.raises(AnnealError, match="from event 1 to 3") as broken:
            list(client.runs.events("run_gap"))
        assert broken.value.code == "stream_broken"

    def test_an_event_that_comes_twice_is_reported(self, client: Anneal) -> None:
        seen = []
        with pytest.raises(AnnealError, match="from event 2 to 2"):
            seen.extend(event.seq for event in client.runs.events("run_again", types=["metric"]))

    def test_a_connection_that_carried_keep_alives_is_no_outage(
        self, client: Anneal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_stream, "_KEEP_ALIVE_SECONDS", 0.0)
        seen = [event.seq for event in client.runs.events("run_quiet", patience=0.05)]
        assert seen == list(range(1, LAST + 1))
        assert Streams.cursors == [None, None, None, "2", "4", "6"]

    def test_a_filtered_reader_resumes_at_its_cursor(self, client: Anneal) -> None:
        assert list(client.runs.events("run_kept", types=["end"])) == []
        assert Streams.cursors == [None, "3", "6"]

    def test_a_refusal_is_reported_in_the_words_of_the_service(self, client: Anneal) -> None:
        with pytest.raises(AnnealError, match=r"There is no such run\."):
            list(client.runs.events("run_none"))

    def test_a_revoked_key_ends_the_stream(self, client: Anneal) -> None:
        seen: list[int] = []
        with pytest.raises(AnnealError, match="revoked") as refused:
            for event in client.runs.events("run_revoked"):
                seen.append(event.seq)
        assert (seen, refused.value.status) == ([1, 2], 401)

    def test_a_service_that_stays_away_is_reported(self) -> None:
        with Anneal("http://127.0.0.1:1", "key") as client, pytest.raises(AnnealError, match="is unreachable"):
            list(client.runs.events("run_1", patience=0))


class TestEvents:
    def trained(self, api: ApiServer, engine: Engine) -> Trainer:
        run = make_run(api.client, make_dataset(engine))
        trainer = Trainer(engine, run["id"]).begin()
        trainer.log("first", "second\u2028 line", "third")
        trainer.metric(10, loss=2.5)
        trainer.events("novelty", {"what": "of a later version"})
        return trainer

    def test_events_are_typed_and_new_types_are_kept(self, api: ApiServer, engine: Engine) -> None:
        trainer = self.trained(api, engine)
        with Anneal(api.url, api.key) as client:
            events = list(client.runs.events(trainer.run_id, follow=False))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert isinstance(events[0], StatusEvent) and events[0].to == "pending"
        (metric,) = [event for event in events if isinstance(event, MetricEvent)]
        assert (metric.step, metric.loss) == (10, 2.5)
        assert [event.line for event in events if isinstance(event, LogEvent)][1] == "second\u2028 line"
        assert type(events[-1]) is Event and events[-1].model_dump()["what"] == "of a later version"

    def test_types_and_a_place_to_begin_are_honored(self, api: ApiServer, engine: Engine) -> None:
        trainer = self.trained(api, engine).complete()
        with Anneal(api.url, api.key) as client:
            chosen = list(client.runs.events(trainer.run_id, types=["metric"]))
            assert [event.type for event in chosen] == ["metric", "end"]
            assert isinstance(chosen[-1], EndEvent) and chosen[-1].status == "completed"
            rest = list(client.runs.events(trainer.run_id, after=chosen[0].seq))
            assert rest[0].seq == chosen[0].seq + 1
            assert list(client.runs.events(trainer.run_id, after=chosen[-1].seq)) == []

    def test_log_lines_come_with_a_tail_and_a_filter(self, api: ApiServer, engine: Engine) -> None:
        trainer = self.trained(api, engine)

        def lines(**options: Any) -> list[str]:
            events = client.runs.logs(trainer.run_id, follow=False, **options)
            return [event.line for event in events if isinstance(event, LogEvent)]

        with Anneal(api.url, api.key) as client:
            assert lines() == ["first", "second\u2028 line", "third"]
            assert lines(tail=1) == ["third"] and lines(grep="ir") == ["first", "third"]
            trainer.fail()
            assert [event.type for event in client.runs.logs(trainer.run_id, tail=1)] == ["log", "end"]

    def test_a_revoked_key_ends_a_stream_that_is_open(
        self, api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "RECHECK_SECONDS", 0.1)
        monkeypatch.setattr("app.api_keys.verifier.CACHE_SECONDS", 0.1)
        trainer = self.trained(api, engine)
        with Anneal(api.url, api.key_with(["read"])) as client:
            events = client.runs.events(trainer.run_id)
            assert next(events).seq == 1
            (key,) = [key for key in list_keys_sync(api.settings) if key.name == "further"]
            revoke_key_sync(api.settings, key.id)
            with pytest.raises(AnnealError, match="`anneal keys create`") as refused:
                list(events)
        assert refused.value.status == 401


@pytest.fixture
def service(settings: Settings, tmp_path: Path) -> Iterator[ProcessServer]:
    """An API process that can be killed, and a worker that trains nothing."""
    settings = settings.model_copy(update={"launch": "cold"})
    with ProcessServer(settings) as server:
        worker = WorkerProcess(settings, tmp_path / "worker.log")
        yield server
        worker.kill()


async def test_every_event_comes_once_through_an_api_that_is_killed_and_started_again(service: ProcessServer) -> None:
    """By the sync client in one thread, by the async one in another, which changes nothing."""
    options = {"steps": 40, "step_seconds": 0.05, "log_lines_per_step": 100}
    with Anneal(service.url, service.key) as client:
        config = {"base_model": "any", "method": "sft", "extra": options}
        dataset = client.datasets.upload(b'{"text": "row"}\n')
        run = client.runs.create({"backend": "fake", "dataset_id": dataset.id, "config": config})
    seen: list[Event] = []
    thread = threading.Thread(target=lambda: seen.extend(_follow(service, run.id, heard)))
    heard = threading.Semaphore(0)
    thread.start()
    for _ in range(30):
        assert heard.acquire(timeout=60)
    service.kill()
    service.start()
    for _ in range(30):
        assert heard.acquire(timeout=60)
    async with AsyncAnneal(service.url, service.key) as asynchronous:
        also = [event async for event in asynchronous.runs.events(run.id)]
        complete = [line async for line in asynchronous.runs.complete_log(run.id)]
    eventually(lambda: not thread.is_alive(), timeout=60)
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
    assert isinstance(seen[-1], EndEvent) and seen[-1].status == "completed"
    assert seen == also
    # The flood is thinned in the stream, and whole in the complete log.
    steps = [int(line.split()[4]) for line in complete if " stdout info step " in line]
    assert steps == [step for step in range(1, 41) for _ in range(100)]
    streamed = [event for event in seen if isinstance(event, LogEvent)]
    left_out = sum(event.left_out or 0 for event in streamed)
    assert left_out > 0 and sum(event.left_out is None for event in streamed) + left_out == len(complete)


def _follow(service: ProcessServer, run_id: str, heard: threading.Semaphore) -> Iterator[Event]:
    with Anneal(service.url, service.key) as client:
        for event in client.runs.events(run_id):
            heard.release()
            yield event

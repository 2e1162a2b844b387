"""What `/metrics` tells, what it costs, and what it does without a database."""

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, text
from starlette.types import Scope

from app.api.middleware.request_metrics import route_template
from app.api_keys import verifier
from app.api_keys.service import create_key_sync, list_keys_sync, revoke_key_sync
from app.api_keys.verifier import KeyVerifier
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, session_maker
from app.infra.ids import id_at, new_id
from app.prometheus import snapshot
from app.prometheus.snapshot import MOST_LIVE, Snapshots
from app.runs.events.log import NewEvent, append_events
from app.runs.events.sources import RunSource
from app.runs.events.stream import Streams
from app.runs.queue.dispatcher import Dispatcher
from app.runs.state import machine
from tests.app.webhooks.rows import add_webhook, enqueue_tests
from tests.conftest import Services
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_run, add_worker, claim
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually, eventually_async

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(api: ApiServer) -> Samples:
    answer = api.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


class TestTheState:
    def test_runs_are_counted_by_status_and_age(self, settings: Settings, engine: Engine) -> None:
        """Live runs, waiting ones, ended ones of today, their attempts, workers and devices."""
        with ThreadServer(settings) as api:
            data = make_dataset(engine)
            run_ids = {name: make_run(api.client, data)["id"] for name in ("trains", "fails", "is lost")}
            trainers = {}
            for name, run_id in run_ids.items():
                trainers[name] = Trainer(engine, run_id).begin(step=7, total=90)
            trainers["fails"].fail()
            with engine.begin() as connection:
                connection.execute(machine.retry(run_ids["is lost"], trainers["is lost"].lease_epoch, "lost", 0.0))
                connection.execute(
                    text("UPDATE runs SET not_before = now() - interval '1 hour' WHERE id = :id"),
                    {"id": run_ids["is lost"]},
                )
            metrics = scrape(api)
        assert value(metrics, "anneal_database_up") == 1
        assert value(metrics, "anneal_broker_up") == 1
        assert value(metrics, "anneal_runs", status="running") == 1
        assert value(metrics, "anneal_runs", status="pending") == value(metrics, "anneal_queue_depth") == 1
        assert value(metrics, "anneal_runs", status="checkpointing") == 0
        assert 3590 < (value(metrics, "anneal_queue_oldest_seconds") or 0) < 3700
        assert value(metrics, "anneal_runs_created_last_day", status="failed") == 1
        assert value(metrics, "anneal_runs_created_last_day", status="running") == 1
        assert value(metrics, "anneal_attempts_ended_last_day", outcome="retried") == 1
        assert value(metrics, "anneal_attempts_ended_last_day", outcome="failed") == 1
        assert value(metrics, "anneal_attempts_ended_last_day", outcome="lost") == 0
        assert value(metrics, "anneal_run_step", run_id=run_ids["trains"]) == 7
        assert value(metrics, "anneal_run_planned_steps", run_id=run_ids["trains"]) == 90
        assert value(metrics, "anneal_run_step", run_id=run_ids["fails"]) is None
        assert value(metrics, "anneal_workers", state="online") == 3
        assert value(metrics, "anneal_devices", kind="cpu", state="busy") == 1
        assert value(metrics, "anneal_devices", kind="cpu", state="free") == 2
        assert [name for name, _ in metrics if name == "anneal_build_info"]

    async def test_ended_attempts_of_an_old_run_count_and_its_creation_does_not(
        self, settings: Settings, engine: Engine
    ) -> None:
        run_id = add_run(engine, id=id_at("run", datetime.now(UTC) - timedelta(days=9))).id
        worker = add_worker(engine)
        claimed = claim(engine, worker)
        with engine.begin() as connection:
            connection.execute(machine.retry(run_id, claimed.lease_epoch, "lost", 0.0))
        taken = await self._taken(settings)
        assert taken.ended == {"retried": 1}
        assert taken.recent == {}
        with engine.begin() as connection:
            connection.execute(text("UPDATE run_attempts SET ended_at = now() - interval '2 days'"))
        assert (await self._taken(settings)).ended == {}

    async def test_number_of_live_runs_with_own_figures_is_limited(self, settings: Settings, engine: Engine) -> None:
        with engine.begin() as connection:
            parents = add_run(engine)
            connection.execute(
                text(
                    "INSERT INTO runs (id, experiment_id, dataset_id, name, backend, config, user_set_fields, status, "
                    "lease_epoch, attempt, lease_owner, lease_expires_at) "
                    "SELECT 'run_' || lpad(n::text, 26, '0'), :experiment, "
                    ":dataset, 'x', 'fake', :config, '[]', 'running', 1, 1, 'wrk', now() FROM generate_series(1, 300) n"
                ),
                {
                    "experiment": parents.experiment_id,
                    "dataset": parents.dataset_id,
                    "config": json.dumps(parents.config),
                },
            )
        taken = await self._taken(settings)
        assert taken.live == {"running": 300}
        assert len(taken.steps) == MOST_LIVE

    async def test_oldest_message_that_waits_is_that_of_an_enabled_webhook(
        self, settings: Settings, engine: Engine
    ) -> None:
        assert (await self._taken(settings)).oldest_delivery_seconds == 0.0
        enabled, disabled = add_webhook(engine), add_webhook(engine, enabled=False)
        age = text("UPDATE webhook_deliveries SET created_at = now() - interval '1 h' * CAST(right(id, 1) AS int)")
        for webhook_id in (enabled, disabled):
            enqueue_tests(engine, webhook_id, 3)
        with engine.begin() as connection:
            connection.execute(age)
            connection.execute(
                text("UPDATE webhook_deliveries SET status = 'delivered' WHERE webhook_id = :id AND id LIKE '%3'"),
                {"id": enabled},
            )
        assert 7200 <= (await self._taken(settings)).oldest_delivery_seconds < 7300

    async def _taken(self, settings: Settings) -> Any:
        reading = async_engine(settings.database_url or "")
        try:
            taken = await Snapshots(reading, settings).latest_snapshot()
        finally:
            await reading.dispose()
        assert taken is not None
        return taken

    async def test_concurrent_scrapes_share_one_query(self, settings: Settings, engine: Engine) -> None:
        reading = async_engine(settings.database_url or "")
        snapshots = Snapshots(reading, settings)
        try:
            results = await asyncio.gather(*(snapshots.latest_snapshot() for _ in range(20)))
            assert len({id(one) for one in results}) == 1
            add_run(engine)
            assert await snapshots.latest_snapshot() is results[0], "for some seconds the same is told"
        finally:
            await reading.dispose()


class TestWithoutADatabase:
    @pytest.fixture
    def api(self, services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
        """One that has been scraped, remembers verified keys for no longer than that, and has lost its database."""
        monkeypatch.setattr(verifier, "CACHE_SECONDS", 0.0)
        monkeypatch.setattr(snapshot, "FRESH_SECONDS", 0.0)
        with ThreadServer(settings) as server:
            assert value(scrape(server), "anneal_database_up") == 1
            self.unused = server.key_with(["read"])
            services.drop_database(settings.database_url or "")
            yield server

    def test_a_scrape_still_answers_and_says_so(self, api: ApiServer) -> None:
        """With what is true of the process; what was true of the runs is not told any more."""
        metrics = scrape(api)
        assert value(metrics, "anneal_database_up") == 0
        assert value(metrics, "anneal_queue_depth") is None
        assert value(metrics, "anneal_runs", status="pending") is None
        assert (value(metrics, "process_resident_memory_bytes") or 0) > 1e6
        assert value(metrics, "anneal_http_requests_total", method="GET", route="/metrics", status="200") == 1

    def test_a_key_that_was_known_opens_nothing_else_and_no_other_key_opens_it(self, api: ApiServer) -> None:
        assert api.client.get("/metrics").status_code == 200
        assert api.client.get("/v1/runs").status_code == 503
        with api.client_with(self.unused) as other:
            assert other.get("/metrics").status_code == 503
        assert api.client_with("anneal_" + "x" * 43).get("/metrics").status_code == 503
        assert api.client_with(None).get("/metrics").status_code == 401

    async def test_a_key_is_known_for_as_long_as_it_lasts_and_not_once_it_was_refused(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = create_key_sync(settings, "x", ["read"], expires_in=timedelta(minutes=5))
        lasting = create_key_sync(settings, "y", ["read"])
        reading = async_engine(settings.database_url or "")
        verifying = KeyVerifier(session_maker(reading))
        try:
            for valid_key in (key, lasting):
                assert await verifying.verify_key(valid_key) and verifying.recently_verified(valid_key)
            revoke_key_sync(settings, next(it.id for it in list_keys_sync(settings) if it.name == "y"))
            assert await verifying.verify_key(lasting) is None
            assert verifying.recently_verified(lasting) is None
            later = time.monotonic() + 301
            # The module's own clock alone: with the process's clock stopped, the event loop would end a minute late.
            monkeypatch.setattr(verifier, "time", SimpleNamespace(monotonic=lambda: later))
            assert verifying.recently_verified(key) is None
        finally:
            await reading.dispose()


class TestRequests:
    def test_requests_are_counted_by_route_template_not_by_path(self, api: ApiServer) -> None:
        api.client.get(f"/v1/runs/{new_id('run')}")
        api.client.get(f"/v1/runs/{new_id('run')}")
        api.client.get(f"/v1/runs/{new_id('run')}/artifacts/runs/{new_id('run')}/artifacts/x")
        for number in range(5):
            api.client.get(f"/nowhere/{number}")
            api.client.request("PROPFIND", f"/nowhere/{number}")
        api.client_with(None).get("/v1/runs/secret")
        metrics = scrape(api)
        get = {"method": "GET"}
        assert value(metrics, "anneal_http_requests_total", **get, route="/v1/runs/{run_id}", status="404") == 2
        artifact = "/v1/runs/{run_id}/artifacts/{path}"
        assert value(metrics, "anneal_http_requests_total", **get, route=artifact, status="404") == 1
        assert value(metrics, "anneal_http_requests_total", **get, route="unmatched", status="404") == 5
        assert value(metrics, "anneal_http_requests_total", **get, route="unmatched", status="401") == 1
        methods = {dict(labels)["method"] for name, labels in metrics if name == "anneal_http_requests_total"}
        assert methods == {"GET", "other"}
        count = "anneal_http_request_duration_seconds_count"
        assert value(metrics, count, **get, route="/v1/runs/{run_id}") == 2

    def test_an_open_stream_counts_as_answered_when_it_begins(self, api: ApiServer, engine: Engine) -> None:
        run = make_run(api.client, make_dataset(engine))["id"]
        with api.client.stream("GET", f"/v1/runs/{run}/events") as answer:
            body = answer.iter_bytes()
            next(body)
            metrics = scrape(api)
        route = "/v1/runs/{run_id}/events"
        assert value(metrics, "anneal_http_requests_total", method="GET", route=route, status="200") == 1

    def test_every_route_of_the_app_has_a_template_of_its_own(self, api: ApiServer) -> None:
        document = api.client.get("/openapi.json").json()
        templates = [path for path, item in document["paths"].items() if "get" in item and "{" in path]
        for path in templates:
            api.client.get(path.replace("{", "").replace("}", ""))
        counted = {dict(labels)["route"] for name, labels in scrape(api) if name == "anneal_http_requests_total"}
        assert set(templates) <= {route.replace(":path", "") for route in counted}

    def test_what_is_mounted_counts_as_one_route(self) -> None:
        scope: Scope = {"type": "http", "path": "/dashboard/some/file.js", "root_path": "/dashboard"}
        assert route_template(scope) == "/dashboard"

    @pytest.mark.parametrize(
        "accept", ["text/plain; version=x", "application/openmetrics-text; version=1.x", ";;;", "*/*", "text/html"]
    )
    def test_whatever_is_asked_for_is_answered(self, api: ApiServer, accept: str) -> None:
        answer = api.client.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200 and "anneal_build_info" in answer.text

    def test_need_a_key_as_prometheus_sends_it(self, api: ApiServer) -> None:
        assert api.client_with(None).get("/metrics").status_code == 401
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        with api.client_with(api.key_with(["read"])) as prometheus:
            answer = prometheus.get("/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")
        assert api.client.get("/metrics").headers["content-type"].startswith("text/plain")


class TestStreams:
    async def test_lag_is_that_of_live_events_and_replays_do_not_count(
        self, settings: Settings, engine: Engine
    ) -> None:
        run_id = add_run(engine).id
        claimed = claim(engine, add_worker(engine))
        reading, queue = async_engine(settings.database_url or ""), Broker(settings)
        streams = Streams(reading, queue)

        async def write(first: int, ts: float) -> None:
            def store() -> None:
                with engine.begin() as connection:
                    append_events(
                        connection,
                        run_id,
                        claimed.lease_epoch,
                        first,
                        [NewEvent.from_payload("log", ts, {"line": "x"})],
                    )

            await asyncio.to_thread(store)

        def observed() -> tuple[float, float]:
            samples = {sample.name: sample.value for sample in next(iter(streams.lag.collect())).samples}
            return samples["anneal_event_lag_seconds_count"], samples["anneal_event_lag_seconds_sum"]

        await write(1, time.time() - 3600)
        seen: list[int] = []

        async def read() -> None:
            async for _, frames in streams.stream_batches(RunSource(run_id), 0):
                seen.extend(frame.seq for frame in frames)

        reader = asyncio.create_task(read())
        try:

            async def is_live() -> bool:
                return streams.measure_load() == (1, 0, 0) and len(seen) >= 3  # pending, initializing, the line

            await eventually_async(is_live)
            assert observed() == (0, 0)
            await write(2, time.time() - 7)

            async def is_delivered() -> bool:
                return observed()[0] == 1

            await eventually_async(is_delivered)
            assert 7 <= observed()[1] < 12
            await write(3, time.time() + 3600)

            async def is_counted() -> bool:
                return observed()[0] == 2

            await eventually_async(is_counted)
            assert 7 <= observed()[1] < 12, "a clock that runs ahead does not count backwards"
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await streams.close()
            await queue.close()
            await reading.dispose()
        assert streams.measure_load() == (0, 0, 0)

    async def test_what_a_slow_reader_has_yet_to_take_is_the_backlog(self, settings: Settings, engine: Engine) -> None:
        run_id = add_run(engine).id
        claimed = claim(engine, add_worker(engine))
        reading, queue = async_engine(settings.database_url or ""), Broker(settings)
        streams = Streams(reading, queue)
        slow, fast = streams.stream_batches(RunSource(run_id), 0), streams.stream_batches(RunSource(run_id), 0)
        try:
            await anext(slow)

            async def run_ahead() -> None:
                async for _ in fast:
                    pass

            ahead = asyncio.create_task(run_ahead())
            new = [NewEvent.from_payload("log", time.time(), {"line": "x"}) for _ in range(40)]

            def store() -> None:
                with engine.begin() as connection:
                    append_events(connection, run_id, claimed.lease_epoch, 1, new)

            await asyncio.to_thread(store)

            async def shows() -> bool:
                return streams.measure_load()[2] >= 40

            await eventually_async(shows)
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
        finally:
            await slow.aclose()  # type: ignore[attr-defined]
            await streams.close()
            await queue.close()
            await reading.dispose()


async def test_a_run_that_is_reclaimed_from_a_silent_worker_counts(settings: Settings, engine: Engine) -> None:
    add_run(engine)
    claim(engine, add_worker(engine), lease=0.05)
    looping, queue = async_engine(settings.database_url or ""), Broker(settings)
    dispatcher = Dispatcher(looping, queue, settings)
    try:

        async def reaped() -> bool:
            return bool((await dispatcher.round())[1])

        await eventually_async(reaped)
    finally:
        await queue.close()
        await looping.dispose()
    samples = next(iter(dispatcher.losses.collect())).samples
    assert [
        sample.value for sample in samples if sample.labels == {"status": "pending"} and "_total" in sample.name
    ] == [1]


def test_a_scrape_shows_streams_that_are_open(api: ApiServer, engine: Engine) -> None:
    run = make_run(api.client, make_dataset(engine))["id"]
    with api.client.stream("GET", f"/v1/runs/{run}/events") as answer:
        body = answer.iter_bytes()
        next(body)
        eventually(lambda: value(scrape(api), "anneal_streams", state="live") == 1)
    eventually(lambda: value(scrape(api), "anneal_streams", state="live") == 0)

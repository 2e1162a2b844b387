"""C14.EVENTS: 10^8 events of many runs in monthly partitions: whether anything takes longer than with 10^5.

A run of 1,000 events is written through the code of the worker; all others are copies of it, inserted by the database
under all constraints, indexes and triggers, with ids of the past year, so that they fill thirteen partitions. At each
power of ten these are measured: a batch of a live run, the start of a stream in the middle of a run half a year old and
of one of this month, their curves, the renewal of a lease, the heartbeat of a worker, a round of the dispatcher, and
the query of Prometheus. Then retention drops the oldest month while a live run stores events.
"""

import asyncio
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg

from app.infra.db import async_engine
from app.infra.ids import id_at
from app.prometheus.snapshot import Snapshots
from app.runs.events.log import NewEvent
from app.runs.queue.dispatcher import Dispatcher
from app.runs.retention import Policy, run_prune
from app.runs.state import machine
from app.tables.base import Base
from app.tables.events import ensure_partitions, month_after
from app.workers import registry
from benchmarks import svg
from benchmarks.attempt import Attempt
from benchmarks.ratios import Lane, Turns
from tests.rows import add_worker
from tests.stack import Stack
from tests.waiting import eventually

FULL, SMALLEST = 10**8, 10**5
EVENTS = 1000
SHOWN = 100
BLOCKS, CALLS = 5, 20
MONTHS = 12
OLD = 6
"""Number of the month that serves as an old one; those before it are dropped, one at each size."""
BYTES_PER_EVENT = 700
"""Bytes on disk for an event, with indexes, WAL and what belongs to its run; rather too many."""
GOAL_FLAT, GOAL_WAIT = 1.5, 1.0
SLACK_MS = 1.0
METRIC = {"step": 10, "epoch": 0.5, "loss": 2.31, "learning_rate": 0.0002, "grad_norm": 0.9, "gpu_memory_mb": None,
          "samples_per_second": 12.5, "extra": {"tokens_per_second": 3120.5}}  # fmt: skip
LINE = "2026-01-02 03:04:05,678 INFO trainer: step 10 loss 2.3145 grad_norm 0.8731 tokens/s 31250.4"


def main(scale: float = 1.0) -> bool:
    """Print times at each size; return True if the goals are reached."""
    sizes = [10**power for power in range(5, 9) if 10**power <= FULL * scale] or [max(26_000, round(FULL * scale))]
    free = shutil.disk_usage(tempfile.gettempdir()).free
    while len(sizes) > 1 and sizes[-1] * BYTES_PER_EVENT > free:
        print(
            f"C14 {sizes[-1]:,} events need up to {sizes[-1] * BYTES_PER_EVENT / 2**30:,.0f} GiB in "
            f"{tempfile.gettempdir()}, which has {free / 2**30:,.0f} GiB: left out; set TMPDIR to a larger disk",
            flush=True,
        )
        sizes.pop()
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        service = Stack(Path(folder), lease_seconds=3600)
        try:
            return _Measurement(service).run(sizes)
        finally:
            service.close()


class _Measurement:
    def __init__(self, service: Stack) -> None:
        self._service = service
        self._url = service.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._months = _months(datetime.now(UTC))
        with service.engine.begin() as connection:
            for month in self._months:
                ensure_partitions(connection, month)
        self._model = _write_model(service)
        self._live = Attempt(service.engine)
        self._worker = add_worker(service.engine)
        self._loop = asyncio.new_event_loop()
        self._engine = async_engine(service.settings.database_url or "", pool_size=1)
        self._counts = [0] * len(self._months)
        """Number of runs of each month."""
        self._dropped = 0
        self._series: dict[str, list[tuple[float, float]]] = {}
        self._is_reached = True

    def run(self, sizes: list[int]) -> bool:
        medians: dict[str, float] = {}
        for size in sizes:
            self._fill(size)
            turns = Turns(f"C14 {size:,} events:", BLOCKS)
            turns.take(self._lanes())
            for name in turns.seconds:
                turns.show(name)
                median = 1e3 * turns.median(name)
                self._series.setdefault(name, []).append((size, median))
                first = medians.setdefault(name, median)
                if size == sizes[-1] and len(sizes) > 1:
                    is_flat = median <= GOAL_FLAT * first or median <= first + SLACK_MS
                    self._is_reached = self._is_reached and is_flat
                    print(
                        f"C14 {name}: {size:,} events take {median / first:.2f} times as long as {sizes[0]:,}; goal "
                        f"{GOAL_FLAT:g}, or {SLACK_MS:g} ms more{'' if is_flat else ': MISSED'}",
                        flush=True,
                    )
            self._prune(size)
        path = svg.line_chart(
            "scale-events.svg", "Time of an operation by the number of events", ("stored events", "ms"),
            self._series, (True, True),
        )  # fmt: skip
        print(f"C14 chart: {path}")
        return self._is_reached

    def _fill(self, size: int) -> None:
        began = time.perf_counter()
        months = range(self._dropped, len(self._months))
        runs_per_month = size // EVENTS // len(self._months)
        jobs = [
            (month, first, min(first + 50, runs_per_month))
            for month in months
            for first in range(self._counts[month], runs_per_month, 50)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: self._copy(*job), jobs))
        for month in months:
            self._counts[month] = runs_per_month
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")
            eventually(lambda: _is_empty(connection, "event_feed_queue"), 600, 0.5, "the feed is numbered")
        os.sync()
        with psycopg.connect(self._url) as connection:
            of_events = _one(
                connection,
                "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
                "WHERE inhparent = 'run_events'::regclass",
            )
            rows = sum(self._counts[month] for month in months) * EVENTS
            whole = _one(connection, "SELECT pg_database_size(current_database())")
        took = time.perf_counter() - began
        print(
            f"C14 {rows:,} events of {rows // EVENTS:,} runs in {len(months)} months: {of_events / rows:,.0f} bytes an "
            f"event with its indexes, database of {whole / 2**30:.2f} GiB, filled in {took:,.0f} s",
            flush=True,
        )

    def _copy(self, month: int, first: int, end: int) -> None:
        ids = [self._id(month, number) for number in range(first, end)]
        ended = self._months[month] + timedelta(days=1)
        with psycopg.connect(self._url) as connection:
            connection.execute("SET LOCAL statement_timeout = 0")
            connection.execute(_copying("runs", "id", {"idempotency_key": "NULL", "finished_at": "%(ended)s",
                                                       "created_at": "%(ended)s"}),
                               {"ids": ids, "model": self._model, "ended": ended})  # fmt: skip
            for table in ("run_attempts", "metric_rollups", "run_events"):
                connection.execute(_copying(table, "run_id", {}), {"ids": ids, "model": self._model})

    def _id(self, month: int, number: int) -> str:
        # The first ten characters are the time; decimal digits are also digits of an id.
        return f"{id_at('run', self._months[month] + timedelta(hours=1))[:14]}{number:016d}"

    def _any(self, month: int) -> str:
        return self._id(month, random.randrange(self._counts[month]))

    def _lanes(self) -> dict[str, Lane]:
        newest = len(self._months) - 1
        heartbeat = registry.record_heartbeat(self._worker, "online", "cold", "")
        return {
            "an empty answer": Lane(self._get("/healthz"), CALLS),
            "append of 100 events": Lane(self._append, CALLS),
            "stream, run half a year old": Lane(lambda: self._seek(self._any(OLD)), CALLS, check=_check_events),
            "stream, run of this month": Lane(lambda: self._seek(self._any(newest)), CALLS, check=_check_events),
            "curve, run half a year old": Lane(lambda: self._curve(self._any(OLD)), CALLS, check=_check_curve),
            "curve, run of this month": Lane(lambda: self._curve(self._any(newest)), CALLS, check=_check_curve),
            "renewal of a lease": Lane(self._executes(machine.renew(self._live.run_id, 1, 3600.0)), CALLS),
            "heartbeat of a worker": Lane(self._executes(heartbeat), CALLS),
            "Prometheus' query": Lane(self._in_loop(self._snapshot), CALLS),
            "round of the dispatcher": Lane(self._in_loop(self._round), CALLS),
        }

    def _append(self) -> None:
        now = time.time()
        self._live.store(
            [NewEvent.from_payload("metric", now, METRIC) for _ in range(50)]
            + [
                NewEvent.from_payload("log", now, {"line": LINE, "stream": "stdout", "level": "info"})
                for _ in range(50)
            ]
        )

    def _get(self, path: str) -> Callable[[], Any]:
        return lambda: self._service.client.get(path).raise_for_status()

    def _seek(self, run_id: str) -> list[int]:
        query: dict[str, Any] = {"after": EVENTS // 2, "follow": "false", "format": "ndjson"}
        with self._service.client.stream("GET", f"/v1/runs/{run_id}/events", params=query) as answer:
            assert answer.status_code == 200, answer.read()
            return [json.loads(line)["seq"] for line in islice(answer.iter_lines(), SHOWN)]

    def _curve(self, run_id: str) -> Any:
        query: dict[str, Any] = {"names": "loss", "max_points": 200}
        return self._service.client.get(f"/v1/runs/{run_id}/metrics", params=query).raise_for_status().json()

    def _executes(self, statement: Any) -> Callable[[], Any]:
        def execute() -> None:
            with self._service.engine.begin() as connection:
                assert connection.execute(statement).one_or_none() is not None

        return execute

    def _in_loop(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: self._loop.run_until_complete(call())

    async def _snapshot(self) -> None:
        assert await Snapshots(self._engine, self._service.settings).latest_snapshot() is not None

    async def _round(self) -> None:
        await Dispatcher(self._engine, None, self._service.settings, ["fake"]).round()  # type: ignore[arg-type]

    def _prune(self, size: int) -> None:
        """Drop the oldest month while a live run stores events, and print how long these had to wait."""
        month, rows = self._dropped, self._counts[self._dropped] * EVENTS
        before = month_after(self._months[month]) + timedelta(days=2)
        policy = Policy(events_days=(datetime.now(UTC) - before) / timedelta(days=1))
        waits: list[float] = []
        over = threading.Event()

        def store() -> None:
            while not over.is_set():
                began = time.perf_counter()
                self._append()
                waits.append(time.perf_counter() - began)

        thread = threading.Thread(target=store)
        thread.start()
        time.sleep(0.5)
        idle = max(waits)
        waits.clear()
        began = time.perf_counter()
        result = run_prune(self._service.settings, policy, dry_run=False)
        took = time.perf_counter() - began
        over.set()
        thread.join()
        assert result.months == [f"{self._months[month]:%Y-%m}"], result
        self._dropped += 1
        longest = max(waits)
        self._is_reached = self._is_reached and longest <= GOAL_WAIT
        self._series.setdefault("retention of a month", []).append((size, 1e3 * took))
        print(
            f"C14 {size:,} events: retention dropped a month of {rows:,} in {took:.2f} s; a batch of another run "
            f"waited at most {longest:.3f} s meanwhile ({idle:.3f} s before it; goal {GOAL_WAIT:g} s)",
            flush=True,
        )


def _months(now: datetime) -> list[datetime]:
    """Return the starts of the past twelve months and of this one."""
    months = [datetime(now.year, now.month, 1, tzinfo=UTC)]
    for _ in range(MONTHS):
        last = months[0] - timedelta(days=1)
        months.insert(0, datetime(last.year, last.month, 1, tzinfo=UTC))
    return months


def _write_model(service: Stack) -> str:
    """Write the run that the others are copies of; return its id."""
    attempt, now = Attempt(service.engine), time.time()
    # Two events of the creation and the claim come before, two of the end after.
    for first in range(0, EVENTS - 4, 100):
        attempt.store(
            [
                NewEvent.from_payload(
                    "metric", now, METRIC | {"step": number, "loss": 2 + 1 / (1 + number) + number % 7 / 10}
                )
                if number % 2
                else NewEvent.from_payload("log", now, {"line": LINE, "stream": "stdout", "level": "info"})
                for number in range(first, min(first + 100, EVENTS - 4))
            ]
        )
    attempt.complete()
    return attempt.run_id


def _copying(table: str, key: str, changed: dict[str, str]) -> str:
    """Return a statement that inserts a copy of the model's rows for each id."""
    columns = [column.name for column in Base.metadata.tables[table].columns if column.computed is None]
    chosen = ", ".join("ids.id" if name == key else changed.get(name, f'model."{name}"') for name in columns)
    names = ", ".join(f'"{name}"' for name in columns)
    order = ", model.seq" if table == "run_events" else ""
    return (
        f"INSERT INTO {table} ({names}) SELECT {chosen} FROM unnest(%(ids)s::text[]) AS ids (id) "
        f"CROSS JOIN {table} AS model WHERE model.{key} = %(model)s ORDER BY ids.id{order}"
    )


def _one(connection: Any, query: str) -> float:
    row = connection.execute(query).fetchone()
    return float(row[0])


def _is_empty(connection: Any, table: str) -> bool:
    return connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is None


def _check_events(seqs: list[int]) -> None:
    assert seqs == list(range(EVENTS // 2 + 1, EVENTS // 2 + 1 + SHOWN)), seqs[:3]


def _check_curve(curve: Any) -> None:
    steps = curve["series"]["loss"]["steps"]
    assert steps[0] == 1 and steps[-1] >= EVENTS - 6 and len(steps) > 50, curve

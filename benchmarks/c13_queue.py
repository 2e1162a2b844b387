"""C13: the queue of runs: how long runs on several devices wait, whether claims keep quotas, and what a claim costs.

The first part simulates a queue with the service's own statements on PostgreSQL, whose clock is replaced: three workers
of four devices, runs of one device (lognormal, about 100 s) that arrive at random, and six runs of four devices and
200 s. Predicted durations are off by a lognormal factor. Each queue runs twice, with reservations and without, which is
how claims worked before there were any. The second part lets eight workers claim 1,500 runs at once, a third of them
on several devices, with quotas. The third part claims from 10^5 waiting runs of 200 keys among 10^6 runs.
"""

import asyncio
import heapq
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.config import Settings
from app.infra.db import driver_url, sync_engine
from app.infra.ids import new_id
from app.runs.scheduler.durations import Estimate
from app.runs.scheduler.forecast import Forecast
from app.runs.scheduler.reserving import reserve
from app.runs.state import machine
from app.standalone.servers import EmbeddedServers
from app.tables import migrate
from app.tables.runs import Run
from tests.rows import add_run, add_worker

SEEDS, LOADS = 10, (0.85, 1.05)
WORKERS, DEVICES = 3, 4
MEAN_SECONDS, SPREAD, ERROR = 100.0, 0.8, 0.3
WIDE, WIDE_SECONDS, SECONDS = 6, 200.0, 7200.0
GOAL_WAIT, GOAL_BUSY, GOAL_CLAIM_MS = 0.2, 0.02, 5.0
CLAIMANTS, CLAIMED = 8, 1500
ROWS, WAITING, KEYS, FLEET = 1_000_000, 100_000, 200, 64
_CLOCK = """
    CREATE SCHEMA simulated;
    CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT cast(current_setting('simulated.now') AS timestamptz) $$;
    CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT cast(current_setting('simulated.now') AS timestamptz) $$;
"""


def main(scale: float = 1.0) -> bool:
    """Print waits, counts and times; return True if the goals are reached."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        servers = EmbeddedServers(Path(folder))
        servers.start()
        try:
            settings = Settings(home=Path(folder), database_url=servers.database_url, lease_seconds=3600)
            migrate.upgrade(settings)
            engine = sync_engine(settings.database_url or "")
            reached = [
                _simulate_queues(settings, engine, max(1, round(SEEDS * scale))),
                _claim_at_once(engine, max(50, round(CLAIMED * scale))),
                _claim_from_many(engine, scale),
            ]
            engine.dispose()
        finally:
            servers.stop()
    return all(reached)


# A simulated queue


@dataclass
class Waits:
    """Waiting times of runs in seconds, and the part of the devices that were in use."""

    wide: list[float] = field(default_factory=list)
    small: list[float] = field(default_factory=list)
    busy: float = 0.0


def _simulate_queues(settings: Settings, engine: Engine, seeds: int) -> bool:
    with engine.begin() as connection:
        connection.execute(text(_CLOCK))
    is_reached = True
    for load in LOADS:
        found: dict[bool, list[Waits]] = {True: [], False: []}
        for seed in range(seeds):
            for reserves in found:
                with engine.begin() as connection:
                    connection.execute(text("TRUNCATE runs, workers, experiments, datasets, run_events CASCADE"))
                workers = [add_worker(engine, devices=DEVICES) for _ in range(WORKERS)]
                found[reserves].append(asyncio.run(_simulate(settings, engine, workers, seed, load, reserves)))
        after, before = (_medians(found[reserves]) for reserves in (True, False))
        is_reached = is_reached and after.wide[0] <= GOAL_WAIT * before.wide[0]
        is_reached = is_reached and after.busy >= before.busy - GOAL_BUSY
        for name, waits in (("without reservations", before), ("with reservations", after)):
            print(
                f"C13 load {load:.2f}, {seeds} queues {name:20s} runs on {DEVICES} devices wait {waits.wide[0]:6.0f} s "
                f"(median; at most {waits.wide[1]:.0f}), on one {waits.small[0]:5.0f} s, devices in use "
                f"{waits.busy:.3f}",
                flush=True,
            )
        print(
            f"C13 load {load:.2f}: runs on {DEVICES} devices wait {after.wide[0] / before.wide[0]:.2f} as long; "
            f"goal {GOAL_WAIT:g}, with as many devices in use within {GOAL_BUSY:g}",
            flush=True,
        )
    return is_reached


def _medians(waits: list[Waits]) -> Waits:
    wide = [seconds for one in waits for seconds in one.wide]
    small = [seconds for one in waits for seconds in one.small]
    return Waits(
        [statistics.median(wide), max(wide)], [statistics.median(small)], statistics.mean(one.busy for one in waits)
    )


async def _simulate(
    settings: Settings, engine: Engine, workers: list[str], seed: int, load: float, reserves: bool
) -> Waits:
    """Let runs arrive, start and end until none is left."""
    draw = random.Random(seed)
    # In the first half, so that those without reservations wait behind a queue and not for its end.
    arrivals = [(SECONDS / 2 * (place + 0.5) / WIDE, DEVICES, WIDE_SECONDS) for place in range(WIDE)]
    rate = (load * WORKERS * DEVICES - WIDE * DEVICES * WIDE_SECONDS / SECONDS) / MEAN_SECONDS
    at = 0.0
    while (at := at + draw.expovariate(rate)) < SECONDS:
        arrivals.append((at, 1, draw.lognormvariate(math.log(MEAN_SECONDS) - SPREAD**2 / 2, SPREAD)))
    queue = _Queue(settings, engine, workers, draw, reserves)
    for at, devices, seconds in sorted(arrivals):
        heapq.heappush(queue.events, (at, next(queue.numbers), "arrive", (devices, seconds)))
    with _predicted(queue):
        return await queue.run()


class _Queue:
    """Simulation of one queue: events by time, on one connection with a clock of its own."""

    def __init__(
        self, settings: Settings, engine: Engine, workers: list[str], draw: random.Random, reserves: bool
    ) -> None:
        self.events: list[tuple[float, int, str, Any]] = []
        self.numbers = iter(range(10**9))
        self.now = 0.0
        self.predicted: dict[str, float] = {}
        """Predicted durations of runs."""
        self.ends: dict[str, float] = {}
        """Predicted ends of runs that train."""
        self._settings = settings
        self._engine = engine
        self._workers = workers
        self._draw = draw
        self._reserves = reserves
        self._parents: dict[str, Any] = {}
        self._runs: dict[str, tuple[float, int, float]] = {}
        self._waits = Waits()
        self._ticks_at = -1.0
        self._began = datetime.now(UTC)
        # As in the worker, each statement is built once: that takes longer than its execution.
        self._claims = {worker: machine.claim(worker, ["fake"], 1e9, "cpu", []) for worker in workers}

    async def run(self) -> Waits:
        url = driver_url(self._settings.database_url or "")
        options = {"options": "-c search_path=simulated,public,pg_catalog -c timezone=UTC"}
        engine = create_async_engine(url, connect_args=options, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            while self.events:
                self.now, _, what, which = heapq.heappop(self.events)
                await connection.execute(text(f"SET simulated.now = '{self._began + timedelta(seconds=self.now)}'"))
                if what == "arrive":
                    await self._arrive(connection, *which)
                elif what == "end":
                    await connection.execute(machine.complete(which, 1, None, "done"))
                elif self._reserves:
                    await reserve(connection, self._settings, ["fake"])
                for worker in self._workers:
                    await self._claim(connection, worker)
                if what != "tick" and self._ticks_at < self.now:
                    # The dispatcher works once a second; nothing changes between two events.
                    self._ticks_at = self.now + 1.0
                    heapq.heappush(self.events, (self._ticks_at, next(self.numbers), "tick", None))
        await engine.dispose()
        self._waits.busy /= WORKERS * DEVICES * SECONDS
        return self._waits

    async def _arrive(self, connection: AsyncConnection, devices: int, seconds: float) -> None:
        if not self._parents:
            run = add_run(self._engine, backend="celery")
            self._parents = {"experiment_id": run.experiment_id, "dataset_id": run.dataset_id}
        run_id = new_id("run")
        values = {
            "id": run_id, "name": "a run", "backend": "fake", "user_set_fields": [], "devices_needed": devices,
            "config": {"base_model": "none", "method": "sft"}, **self._parents,
        }  # fmt: skip
        await connection.execute(machine.create(values))
        self._runs[run_id] = (self.now, devices, seconds)
        self.predicted[run_id] = seconds * self._draw.lognormvariate(0, ERROR)

    async def _claim(self, connection: AsyncConnection, worker: str) -> None:
        while (row := (await connection.execute(self._claims[worker])).one_or_none()) is not None:
            arrived, devices, seconds = self._runs[row.id]
            self.ends[row.id] = self.now + self.predicted[row.id]
            heapq.heappush(self.events, (self.now + seconds, next(self.numbers), "end", row.id))
            (self._waits.wide if devices > 1 else self._waits.small).append(self.now - arrived)
            self._waits.busy += devices * max(min(self.now + seconds, SECONDS) - self.now, 0.0)


@contextmanager
def _predicted(queue: _Queue) -> Iterator[None]:
    """Replace the estimates of the service, which need runs that have really trained."""

    def estimate(_: Forecast, run: Any, __: Any, ___: Any = None) -> Estimate:
        if run.id not in queue.ends:
            return Estimate(queue.predicted[run.id], "high", "")
        # A run that takes longer than predicted is expected to end soon.
        left = max(queue.ends[run.id] - queue.now, 0.05 * queue.predicted[run.id])
        return Estimate(left + run.ago, "high", "")

    original = Forecast.estimate
    Forecast.estimate = estimate  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Forecast.estimate = original  # type: ignore[method-assign]


# Many claims at once


def _claim_at_once(engine: Engine, count: int) -> bool:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE runs, workers, experiments, datasets, run_events CASCADE"))
    model = add_run(engine, backend="celery")
    parents = {"experiment_id": model.experiment_id, "dataset_id": model.dataset_id}
    draw = random.Random(1)
    keys = [f"key_{number}" for number in range(5)]
    with engine.begin() as connection:
        for place, key in enumerate(keys):
            row = {"id": key, "digest": key.ljust(64, "0"), "most": 4 + place}
            connection.execute(
                text(
                    "INSERT INTO api_keys (id, name, prefix, digest, scopes, max_devices) "
                    "VALUES (:id, 'key', 'x', :digest, ARRAY['write'], :most)"
                ),
                row,
            )
        for number in range(count):
            needed = draw.choice((2, 3, 4)) if number % 3 == 0 else 1
            values = {
                "id": new_id("run"), "name": "a run", "backend": "fake", "user_set_fields": [], **parents,
                "config": {"base_model": "none", "method": "sft"}, "devices_needed": needed,
                "created_by": draw.choice(keys),
            }  # fmt: skip
            connection.execute(machine.create(values))
    workers = [add_worker(engine, devices=DEVICES) for _ in range(CLAIMANTS)]
    wrong: list[str] = []
    done: list[str] = []
    took: list[float] = []

    claims = {worker: machine.claim(worker, ["fake"], 3600.0, "cpu", []) for worker in workers}
    locks = {worker: machine.lock_for_claim(worker) for worker in workers}

    def take(worker: str) -> Any:
        with engine.begin() as connection:
            for lock in locks[worker]:
                connection.execute(lock)
            return connection.execute(claims[worker]).one_or_none()

    def work(worker: str) -> None:
        idle = 0
        while len(done) < count and idle < 2000:
            began = time.perf_counter()
            row = take(worker)
            took.append(time.perf_counter() - began)
            if row is None:
                idle += 1
                continue
            idle = 0
            if len(row.device_indexes) != row.devices_needed:
                wrong.append(f"run {row.id} has {len(row.device_indexes)} devices of {row.devices_needed}")
            time.sleep(0.002)
            with engine.begin() as connection:
                connection.execute(machine.complete(row.id, 1, None, "done")).one()
            done.append(row.id)

    def watch() -> None:
        held = text(
            "SELECT runs.created_by, count(*), min(api_keys.max_devices) AS most FROM devices "
            "JOIN runs ON runs.id = devices.run_id JOIN api_keys ON api_keys.id = runs.created_by GROUP BY 1"
        )
        halves = text(
            "SELECT runs.id FROM runs LEFT JOIN devices ON devices.run_id = runs.id WHERE runs.status = 'initializing' "
            "GROUP BY runs.id "
            "HAVING count(devices.index) <> runs.devices_needed OR count(DISTINCT devices.worker_id) > 1"
        )
        while any(thread.is_alive() for thread in threads):
            with engine.connect() as connection:
                wrong.extend(
                    f"{row[0]} holds {row[1]} of {row[2]}" for row in connection.execute(held) if row[1] > row[2]
                )
                wrong.extend(f"{row[0]} is placed in part" for row in connection.execute(halves))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in (*threads, watcher):
        thread.join()
    print(
        f"C13 {len(done)} of {count} runs trained, each once: {len(set(done)) == len(done)}; by {CLAIMANTS} workers at "
        f"once, {statistics.median(took) * 1e3:.1f} ms a claim; violations of placement and quotas: {len(wrong)}",
        flush=True,
    )
    return len(done) == count == len(set(done)) and not wrong


# A long queue


def _claim_from_many(engine: Engine, scale: float) -> bool:
    rows, waiting = round(ROWS * scale), round(WAITING * scale)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE runs, workers, experiments, datasets, run_events, api_keys CASCADE"))
    model = add_run(engine)
    workers = [add_worker(engine, devices=8) for _ in range(FLEET)]
    columns = [column.name for column in Run.__table__.columns if column.computed is None]
    different = {
        "id": "'run_01m' || lpad(n::text, 23, '0')", "idempotency_key": "NULL", "created_by": f"'key_' || n % {KEYS}",
        "status": f"CASE WHEN n <= {waiting} THEN 'pending' ELSE 'completed' END",
        "finished_at": f"CASE WHEN n > {waiting} THEN now() END", "priority": "n % 3",
    }  # fmt: skip
    chosen = ", ".join(different.get(name, f'model."{name}"') for name in columns)
    names = ", ".join(f'"{name}"' for name in columns)
    with engine.begin() as connection:
        connection.execute(
            text(f"INSERT INTO runs ({names}) SELECT {chosen} FROM generate_series(1, {rows}) AS n, runs AS model "
                 "WHERE model.id = :id"),
            {"id": model.id},
        )  # fmt: skip
        connection.execute(
            text(
                "INSERT INTO device_usage "
                "SELECT 'key_' || n, 1000 * random(), now() FROM generate_series(0, :most) AS n"
            ),
            {"most": KEYS - 1},
        )
    raw = psycopg.connect(
        engine.url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
    )
    raw.execute("VACUUM (ANALYZE) runs, device_usage, devices, workers")
    raw.close()
    took = []
    claims = [machine.claim(worker, ["fake"], 3600.0, "cpu", []) for worker in workers]
    locks = [machine.lock_for_claim(worker) for worker in workers]
    for number in range(300):
        began = time.perf_counter()
        with engine.begin() as connection:
            for lock in locks[number % FLEET]:
                connection.execute(lock)
            assert connection.execute(claims[number % FLEET]).one_or_none() is not None
        took.append(1e3 * (time.perf_counter() - began))
    median = statistics.median(took)
    print(
        f"C13 a claim from {waiting:,} waiting runs of {KEYS} keys among {rows:,} takes {median:.2f} ms "
        f"(95 % within {sorted(took)[int(0.95 * len(took))]:.2f}); goal {GOAL_CLAIM_MS:g} ms",
        flush=True,
    )
    return median <= GOAL_CLAIM_MS

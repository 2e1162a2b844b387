"""C13.QUEUE: how long runs on several devices wait.

A queue is simulated with the service's own statements on PostgreSQL, whose clock is replaced: three workers of four
devices, runs of one device (lognormal, about 100 s) that arrive at random, and six runs of four devices and 200 s.
The load is that of the runs of one device; those of four devices come in addition.
Predicted durations are off by a lognormal factor. Each queue runs with reservations and without, which is how claims
worked before there were any. It also runs with perfect knowledge, which no scheduler has: durations are predicted
exactly, and of several workers that could take a run, the first claim is that of the one which leaves the earliest
time at which a worker is free as early as possible.
"""

import asyncio
import heapq
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.config import Settings
from app.infra.db import driver_url, sync_engine
from app.infra.ids import new_id
from app.runs.queue.claim import claim_run
from app.runs.queue.durations import Estimate
from app.runs.queue.planning import plan_queue
from app.runs.queue.snapshot import Forecast
from app.runs.state import machine
from app.standalone.servers import EmbeddedServers
from app.tables import migrate
from tests.rows import add_run, add_worker

SEEDS, LOADS = 10, (0.85, 1.05)
WORKERS, DEVICES = 3, 4
MEAN_SECONDS, SPREAD, ERROR = 100.0, 0.8, 0.3
WIDE, WIDE_SECONDS, SECONDS = 6, 200.0, 7200.0
GOAL_WAIT, GOAL_BUSY = 0.2, 0.02
WITHOUT, WITH, PERFECT = "without reservations", "with reservations", "with perfect knowledge"
_CLOCK = """
    CREATE SCHEMA simulated;
    CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT cast(current_setting('simulated.now') AS timestamptz) $$;
    CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE
        AS $$ SELECT cast(current_setting('simulated.now') AS timestamptz) $$;
"""


def main(scale: float = 1.0) -> bool:
    """Print waits; return True if the goals are reached."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        servers = EmbeddedServers(Path(folder))
        servers.start()
        try:
            settings = Settings(home=Path(folder), database_url=servers.database_url, lease_seconds=3600)
            migrate.upgrade_schema(settings)
            engine = sync_engine(settings.database_url or "")
            is_reached = _simulate_queues(settings, engine, max(1, round(SEEDS * scale)))
            engine.dispose()
        finally:
            servers.stop()
    return is_reached


@dataclass
class Waits:
    """Waiting times of runs in seconds, and the part of the devices that were in use."""

    multi_device: list[float] = field(default_factory=list)
    small: list[float] = field(default_factory=list)
    busy: float = 0.0


def _simulate_queues(settings: Settings, engine: Engine, seeds: int) -> bool:
    with engine.begin() as connection:
        connection.execute(text(_CLOCK))
    is_reached = True
    for load in LOADS:
        waits_by_policy: dict[str, list[Waits]] = {WITHOUT: [], WITH: [], PERFECT: []}
        for seed in range(seeds):
            for variant in waits_by_policy:
                with engine.begin() as connection:
                    connection.execute(text("TRUNCATE runs, workers, experiments, datasets, run_events CASCADE"))
                workers = [add_worker(engine, devices=DEVICES) for _ in range(WORKERS)]
                waits_by_policy[variant].append(asyncio.run(_simulate(settings, engine, workers, seed, load, variant)))
        medians = {variant: _medians(waits) for variant, waits in waits_by_policy.items()}
        before, after, perfect = medians[WITHOUT], medians[WITH], medians[PERFECT]
        is_reached = is_reached and after.multi_device[0] <= GOAL_WAIT * before.multi_device[0]
        is_reached = is_reached and after.busy >= before.busy - GOAL_BUSY
        for variant, waits in medians.items():
            print(
                f"C13 load {load:.2f}, {seeds} queues {variant:22s} runs on {DEVICES} devices wait "
                f"{waits.multi_device[0]:6.0f} s (median; at most {waits.multi_device[1]:.0f}), "
                f"on one {waits.small[0]:5.0f} s, devices in use {waits.busy:.3f}",
                flush=True,
            )
        print(
            f"C13 load {load:.2f}: runs on {DEVICES} devices wait {after.multi_device[0] / before.multi_device[0]:.2f} "
            f"as long, {perfect.multi_device[0] / before.multi_device[0]:.2f} with perfect knowledge; "
            f"goal {GOAL_WAIT:g}, with as many devices in use within {GOAL_BUSY:g}",
            flush=True,
        )
    return is_reached


def _medians(waits: list[Waits]) -> Waits:
    multi_device = [seconds for one in waits for seconds in one.multi_device]
    small = [seconds for one in waits for seconds in one.small]
    return Waits(
        [statistics.median(multi_device), max(multi_device)],
        [statistics.median(small)],
        statistics.mean(one.busy for one in waits),
    )


async def _simulate(
    settings: Settings, engine: Engine, workers: list[str], seed: int, load: float, variant: str
) -> Waits:
    """Let runs arrive, start and end until none is left."""
    draw = random.Random(seed)
    # In the first half, so that those without reservations wait behind a queue and not for its end.
    arrivals = [(SECONDS / 2 * (place + 0.5) / WIDE, DEVICES, WIDE_SECONDS) for place in range(WIDE)]
    rate = load * WORKERS * DEVICES / MEAN_SECONDS
    at = 0.0
    while (at := at + draw.expovariate(rate)) < SECONDS:
        arrivals.append((at, 1, draw.lognormvariate(math.log(MEAN_SECONDS) - SPREAD**2 / 2, SPREAD)))
    queue = _Queue(settings, engine, workers, draw, variant)
    for at, devices, seconds in sorted(arrivals):
        heapq.heappush(queue.events, (at, next(queue.numbers), "arrive", (devices, seconds)))
    with _predicted(queue):
        return await queue.run()


class _Queue:
    """Simulation of one queue: events by time, on one connection with a clock of its own."""

    def __init__(
        self, settings: Settings, engine: Engine, workers: list[str], draw: random.Random, variant: str
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
        self._variant = variant
        self._last_ends = dict.fromkeys(workers, 0.0)
        """Time at which the last run of each worker ends."""
        self._parents: dict[str, Any] = {}
        self._runs: dict[str, tuple[float, int, float]] = {}
        self._waits = Waits()
        self._ticks_at = -1.0
        self._began = datetime.now(UTC)

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
                elif self._variant != WITHOUT:
                    await plan_queue(connection, self._settings, ["fake"])
                order = self._workers
                if what == "arrive" and self._variant == PERFECT:
                    order = self._best_first(self.now + which[1])
                for worker in order:
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
        factor = self._draw.lognormvariate(0, ERROR)
        self.predicted[run_id] = seconds if self._variant == PERFECT else seconds * factor

    def _best_first(self, end: float) -> list[str]:
        """Order workers by how early one of them would be free if the run that has arrived, and ends then, starts."""

        def times(worker: str) -> list[float]:
            return sorted(max(at, end) if other == worker else at for other, at in self._last_ends.items())

        return sorted(self._workers, key=times)

    async def _claim(self, connection: AsyncConnection, worker: str) -> None:
        while (row := await connection.run_sync(claim_run, worker, 1e9)) is not None:
            arrived, devices, seconds = self._runs[row.id]
            self.ends[row.id] = self.now + self.predicted[row.id]
            self._last_ends[worker] = max(self._last_ends[worker], self.now + seconds)
            heapq.heappush(self.events, (self.now + seconds, next(self.numbers), "end", row.id))
            (self._waits.multi_device if devices > 1 else self._waits.small).append(self.now - arrived)
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

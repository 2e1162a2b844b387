"""C1: durable, idempotent storage of 1,000 metric values per call, against MLflow's `log_batch` and COPY.

A point is one (name, step, value). All sides get the same prepared points, ten names at a hundred steps per call, and
are timed from the call to the return of the commit. Anneal stores 100 events with ten values each, as a trainer sends
them: events and rollups in one transaction. MLflow's `log_batch` writes directly to its store, without its server. The
lower bound is COPY: of the 1,000 points, one row each, into a table with a primary key; and of the 100 event rows,
which cannot serve curves, into a table with the columns, key and index of the event log.
"""

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from app.runs.events.log import NewEvent, Progress
from benchmarks.attempt import Attempt
from benchmarks.mlflow_peer import Mlflow, settings
from benchmarks.ratios import Lane, Turns
from tests.stack import Stack

POINTS = 1000
NAMES = ("epoch", "loss", "learning_rate", "grad_norm", "gpu_memory_mb", "samples_per_second")
EXTRA = ("tokens_per_second", "mfu", "step_seconds", "data_seconds")
STEPS = POINTS // (len(NAMES) + len(EXTRA))
BLOCKS = 9
CALLS = {"ours": 60, "COPY": 60, "COPY of events": 60, "MLflow": 6}
GOAL_MLFLOW, GOAL_COPY = 25.0, 0.6
_COLUMNS = "run_id text, seq bigint, name text, step bigint, value double precision, ts timestamptz"
MakeRows = Callable[[list[tuple[int, dict[str, float]]], int], list[Any]]
_RUN_ID = "run_00000000000000000000000000"


def main(scale: float = 1.0) -> bool:
    """Print rates and ratios; return True if the goals are reached."""
    calls = {name: max(2, int(count * scale)) for name, count in CALLS.items()}
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        service = Stack(Path(folder), lease_seconds=3600)
        stack.callback(service.close)
        mlflow = Mlflow(service)
        print("C1", settings(service, "log_batch of 1,000 metrics straight to its store"), flush=True)
        ours, peer = Ours(service), Peer(mlflow)
        keyed, copied = f"{_COLUMNS}, PRIMARY KEY (run_id, seq)", "run_id, seq, name, step, value, ts"
        points = stack.enter_context(Floor(service, "c1_points", keyed, copied, _rows_of_points, POINTS))
        like, copied = "LIKE run_events INCLUDING ALL", "run_id, seq, type, attempt, ts, data"
        events = stack.enter_context(Floor(service, "c1_events", like, copied, _rows_of_events, STEPS))
        turns = Turns("C1", BLOCKS)
        sides = {"ours": ours, "COPY": points, "COPY of events": events, "MLflow": peer}
        turns.take({name: Lane(side.store, calls[name], side.prepare) for name, side in sides.items()})
        for side in sides.values():
            side.check()
    for name in calls:
        turns.show(name, f"{POINTS / turns.median(name):9,.0f} points/s")
    over, part, strict = (turns.ratio(name, "ours") for name in ("MLflow", "COPY", "COPY of events"))
    print(f"C1 ours stores {over} times as many points a second as MLflow; goal {GOAL_MLFLOW:g}")
    print(f"C1 ours stores {part} of what COPY of a row for each point does; goal {GOAL_COPY:g}")
    print(f"C1 ours stores {strict} of what COPY of a row for each event does")
    return over.median >= GOAL_MLFLOW and part.median >= GOAL_COPY


class Points:
    """Metric values of an endless training."""

    def __init__(self) -> None:
        self.calls = 0
        self._random = random.Random(7)

    def next(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, values by name) for the next steps."""
        first = self.calls * STEPS
        self.calls += 1
        return [(first + n, {name: self._random.random() for name in NAMES + EXTRA}) for n in range(STEPS)]

    @property
    def steps(self) -> int:
        return self.calls * STEPS


def _events(steps: list[tuple[int, dict[str, float]]]) -> list[NewEvent]:
    return [
        NewEvent.from_payload(
            "metric",
            time.time(),
            {"step": step, **{name: found[name] for name in NAMES}, "extra": {name: found[name] for name in EXTRA}},
        )
        for step, found in steps
    ]


class Ours:
    """Run in the database, written as a worker does."""

    def __init__(self, service: Stack) -> None:
        self._service = service
        self._attempt = Attempt(service.engine)
        self._points = Points()
        self._ready: list[list[NewEvent]] = []

    def prepare(self) -> None:
        self._ready.append(_events(self._points.next()))

    def store(self) -> None:
        new = self._ready.pop()
        self._attempt.store(new, Progress(self._attempt.stored, 0.5, 100_000, 0.1))
        self._last = new

    def check(self) -> None:
        """Check that each point is stored once, even after the last call is repeated."""
        self._attempt.send(self._attempt.stored - STEPS + 1, self._last)
        with psycopg.connect(self._service.settings.database_url or "") as connection:
            run_id = (self._attempt.run_id,)
            events = "SELECT count(*) FROM run_events WHERE run_id = %s AND type = 'metric'"
            rolled_up = "SELECT points FROM metric_rollups WHERE run_id = %s AND level = 0"
            assert connection.execute(events, run_id).fetchone() == (self._points.steps,)
            assert connection.execute(rolled_up, run_id).fetchone() == (self._points.steps,)


def _rows_of_points(steps: list[tuple[int, dict[str, float]]], first: int) -> list[Any]:
    """Return a row for each point, numbered from `first`."""
    now = datetime.now(UTC)
    points = ((name, step, value) for step, found in steps for name, value in found.items())
    return [(_RUN_ID, seq, name, step, value, now) for seq, (name, step, value) in enumerate(points, first)]


def _rows_of_events(steps: list[tuple[int, dict[str, float]]], first: int) -> list[Any]:
    """Return a row for each event, as in the event log."""
    return [(_RUN_ID, seq, one.type, 1, one.ts, one.data) for seq, one in enumerate(_events(steps), first)]


class Floor:
    """COPY of a fixed number of rows per call into a plain table."""

    def __init__(self, service: Stack, table: str, columns: str, copied: str, rows: MakeRows, a_call: int) -> None:
        self._connection = psycopg.connect(service.settings.database_url or "")
        self._connection.execute(f"CREATE TABLE {table} ({columns})")
        self._connection.commit()
        self._copy, self._count = f"COPY {table} ({copied}) FROM STDIN", f"SELECT count(*) FROM {table}"
        self._rows, self._a_call = rows, a_call
        self._points = Points()
        self._ready: list[list[Any]] = []

    def __enter__(self) -> "Floor":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def prepare(self) -> None:
        first = self._points.calls * self._a_call + 1
        self._ready.append(self._rows(self._points.next(), first))

    def store(self) -> None:
        with self._connection.cursor() as cursor, cursor.copy(self._copy) as copy:
            for row in self._ready.pop():
                copy.write_row(row)
        self._connection.commit()

    def check(self) -> None:
        assert self._connection.execute(self._count).fetchone() == (self._points.calls * self._a_call,)


class Peer:
    """Run in MLflow."""

    def __init__(self, mlflow: Mlflow) -> None:
        self._mlflow = mlflow
        self._run_id = mlflow.new_run()
        self._points = Points()
        self._ready: list[list[Any]] = []

    def prepare(self) -> None:
        from mlflow.entities import Metric

        now = int(datetime.now(UTC).timestamp() * 1000)
        steps = self._points.next()
        self._ready.append([Metric(name, value, now, step) for step, found in steps for name, value in found.items()])

    def store(self) -> None:
        self._mlflow.client.log_batch(self._run_id, metrics=self._ready.pop())

    def check(self) -> None:
        with self._mlflow.connection() as connection:
            row = connection.execute("SELECT count(*) FROM metrics WHERE run_uuid = %s", (self._run_id,)).fetchone()
        assert row == (self._points.calls * POINTS,)

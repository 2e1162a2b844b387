"""C3: a curve of a million points downsampled to a thousand over HTTP, against MLflow's bulk interval.

Both serve one run of 10,000 points and one of a million from a server process on the same PostgreSQL, to one client
with a persistent connection. Anneal's call is `GET /v1/runs/{id}/metrics?names=loss&max_points=1000`, MLflow's the one
that its own pages use for curves. Inserting the points is not measured: Anneal's go through the code of the worker, so
that the rollups are the same as after a training; MLflow's rows are copied into its table.
"""

import math
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.runs.events.log import NewEvent
from benchmarks.attempt import Attempt
from benchmarks.mlflow_peer import Mlflow, settings
from benchmarks.ratios import Lane, Turns
from tests.stack import Stack

SHORT, LONG = 10_000, 1_000_000
SHOWN = 1000
BLOCKS = 7
CALLS, PEER_CALLS = 40, 3
GOAL, GOAL_FLAT = 100.0, 1.2
_AT_ONCE = 2000
_PATH = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"


def main(scale: float = 1.0) -> bool:
    """Print times and ratios; return True if the goals are reached."""
    sizes = {"short": int(SHORT * scale), "long": int(LONG * scale)}
    curves = {name: Curve.drawn(points) for name, points in sizes.items()}
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        service = Stack(Path(folder), lease_seconds=3600)
        stack.callback(service.close)
        mlflow = Mlflow(service)
        print("C3", settings(service, "mlflow server, one worker process, get-history-bulk-interval"), flush=True)
        lanes: dict[str, Lane] = {}
        began = time.monotonic()
        for name, curve in curves.items():
            lanes[f"ours, {sizes[name]:,}"] = _ours(service, curve)
        peer = httpx.Client(base_url=stack.enter_context(mlflow.server()), timeout=120, trust_env=False)
        stack.callback(peer.close)
        for name, curve in curves.items():
            lanes[f"MLflow, {sizes[name]:,}"] = _theirs(mlflow, peer, curve)
        with service.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("SET statement_timeout = 0")
            connection.exec_driver_sql("VACUUM (ANALYZE) run_events, metric_rollups")
        with mlflow.connection() as own:
            own.execute("VACUUM (ANALYZE) metrics")
        print(f"C3 filled in {time.monotonic() - began:.0f} s", flush=True)
        turns = Turns("C3", BLOCKS)
        turns.take(lanes)
    short, long = (f"ours, {sizes[name]:,}" for name in ("short", "long"))
    for name in lanes:
        turns.show(name)
    over, flat = turns.ratio(f"MLflow, {sizes['long']:,}", long), turns.ratio(long, short)
    print("C3 every answer of ours had both ends and the exact extremes of the points that were stored")
    print(f"C3 MLflow, which keeps no extremes, takes {over} times as long; goal {GOAL:g}")
    print(
        f"C3 ours takes {flat} times as long for {sizes['long']:,} points as for {sizes['short']:,}; goal {GOAL_FLAT:g}"
    )
    return over.median >= GOAL and flat.median <= GOAL_FLAT


@dataclass(frozen=True)
class Curve:
    """Return losses for steps 0, 1, 2, …, with one spike up and one down that downsampling must keep."""

    values: list[float]

    @classmethod
    def drawn(cls, points: int) -> "Curve":
        """Return a falling loss with noise."""
        chance = random.Random(3)
        values = [8 * math.exp(-3 * step / points) + chance.gauss(0, 0.1) for step in range(points)]
        values[points * 2 // 3 + 1], values[points // 3 + 1] = 20.25, -4.5
        return cls(values)


def _ours(service: Stack, curve: Curve) -> Lane:
    attempt = Attempt(service.engine)
    for first in range(0, len(curve.values), _AT_ONCE):
        now = time.time()
        steps = enumerate(curve.values[first : first + _AT_ONCE], first)
        attempt.store([NewEvent.from_payload("metric", now, {"step": step, "loss": loss}) for step, loss in steps])
    attempt.complete()
    path, query = f"/v1/runs/{attempt.run_id}/metrics", {"names": "loss", "max_points": SHOWN}
    extremes = (min(curve.values), max(curve.values))

    def check(answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()["series"]["loss"]
        steps, values = shown["steps"], shown["values"]
        assert (shown["min"], shown["max"]) == extremes == (min(values), max(values))
        assert len(steps) <= SHOWN and (steps[0], steps[-1]) == (0, len(curve.values) - 1)
        assert all(curve.values[step] == value for step, value in zip(steps, values, strict=True))

    return Lane(lambda: service.client.get(path, params=query), CALLS, check=check)


def _theirs(mlflow: Mlflow, peer: httpx.Client, curve: Curve) -> Lane:
    run_id = mlflow.new_run()
    now = int(time.time() * 1000)
    columns = "key, value, timestamp, run_uuid, step, is_nan"
    last = ("loss", curve.values[-1], now, run_id, len(curve.values) - 1, False)
    with mlflow.connection() as connection:
        with connection.cursor() as cursor, cursor.copy(f"COPY metrics ({columns}) FROM STDIN") as copy:
            for step, loss in enumerate(curve.values):
                copy.write_row(("loss", loss, now, run_id, step, False))
        connection.execute(f"INSERT INTO latest_metrics ({columns}) VALUES (%s, %s, %s, %s, %s, %s)", last)
    query = {"run_ids": run_id, "metric_key": "loss", "max_results": SHOWN}

    def check(answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["metrics"]) == min(SHOWN, len(curve.values))

    return Lane(lambda: peer.get(_PATH, params=query), PEER_CALLS, check=check)

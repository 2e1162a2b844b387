"""C4: pages of 50 runs out of 10^5 and 10^6, filtered, sorted and deep, against MLflow's `search_runs`.

Anneal's call is `GET /v1/runs` over HTTP. MLflow's client queries its store in the database directly, without its
server; its deep pages use the page token that it would return there. Both hold the same runs in ten experiments:
Anneal's with the whole configuration and a checkpoint each, MLflow's with one metric, two parameters and two tags. They
are inserted by SQL with every constraint and index of production; the insertion is not measured.

`GET /healthz`, which answers without a look at the database, is the lower bound of any call. The calls of the dashboard
that have no peer are measured beside it: the row view, the counts by status, and a search by name; so is the list of
the same runs as jobs of OpenAI's API.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from app.infra.ids import new_id
from app.tables.runs import Run
from benchmarks.mlflow_peer import Mlflow, settings
from benchmarks.ratios import Lane, Turns
from tests.stack import Stack

SIZES = (100_000, 1_000_000)
PAGE = 50
EXPERIMENTS, TEAMS, RARE = 10, 20, 10_000
BLOCKS = 5
CALLS, PEER_CALLS = 30, 1
GOAL, NEAR_MS, GOAL_FLAT, GOAL_JOBS = 20.0, 2.0, 1.2, 1.5
EMPTY = "an empty answer"
_NEWEST = ["attributes.start_time DESC"]
_BEST = ["metrics.loss ASC", "attributes.start_time DESC"]


@dataclass(frozen=True)
class Case:
    """One query, for both sides."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    deep: bool = False
    """True to also measure the page at the middle of the list."""
    one_experiment: bool = False
    shows: Callable[[dict[str, Any]], bool] = field(default=lambda run: True)


CASES = (
    Case("newest", {}, {"order_by": _NEWEST}, deep=True),
    Case(
        "experiment, status", {"status": "completed"},
        {"filter_string": "attributes.status = 'FINISHED'", "order_by": _NEWEST}, one_experiment=True,
        shows=lambda run: run["status"] == "completed",
    ),
    Case(
        "tag, one in 20", {"tag": "team-7"}, {"filter_string": "tags.team = 'team-7'", "order_by": _NEWEST},
        shows=lambda run: "team-7" in run["tags"],
    ),
    Case(
        "tag, one in 10,000", {"tag": "rare"}, {"filter_string": "tags.rare = 'rare'", "order_by": _NEWEST},
        shows=lambda run: "rare" in run["tags"],
    ),
    Case("lowest loss", {"sort": "best", "method": "sft"}, {"order_by": _BEST}, deep=True),
)  # fmt: skip
PAGES = {
    "row view": {"view": "row"},
    "row view, one status": {"view": "row", "status": "completed"},
    "by exact name": {"view": "row", "find": "run 77"},
    "search for what many names have": {"view": "row", "search": "RUN 7"},
    "search for what no name has": {"view": "row", "search": "no such run"},
    "full view": {"view": "full"},
}
COUNTS = {"counts": {}, "counts of an experiment": {"experiment_id": None}, "counts of a rare tag": {"tag": "rare"}}


def main(scale: float = 1.0) -> bool:
    """Print times and ratios; return True if the goals are reached."""
    is_reached = True
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        service = Stack(Path(folder), lease_seconds=3600)
        stack.callback(service.close)
        mlflow = Mlflow(service)
        print("C4", settings(service, "search_runs of a client straight on its store"), flush=True)
        ours, theirs = Ours(service), Theirs(mlflow)
        for size in (int(size * scale) for size in SIZES):
            began = time.monotonic()
            ours.fill(size)
            theirs.fill(size)
            print(f"C4 {size:,} runs on each side, filled in {time.monotonic() - began:.0f} s", flush=True)
            is_reached = _measure(ours, theirs, size) and is_reached
    return is_reached


def _measure(ours: "Ours", theirs: "Theirs", size: int) -> bool:
    is_reached = True
    for case in CASES:
        turns = Turns(f"C4 {size:>9,}", BLOCKS)
        lanes = {EMPTY: ours.empty(), f"ours, {case.name}": ours.lane(case), f"MLflow, {case.name}": theirs.lane(case)}
        if case.deep:
            lanes[f"ours, {case.name}, deep"] = ours.lane(case, ours.half(case))
            lanes[f"MLflow, {case.name}, deep"] = theirs.lane(case, size // 2)
        turns.take(lanes)
        for name in lanes:
            turns.show(name)
        for place in ("", ", deep") if case.deep else ("",):
            over = turns.ratio(f"MLflow, {case.name}{place}", f"ours, {case.name}{place}")
            beyond = 1e3 * (turns.median(f"ours, {case.name}{place}") - turns.median(EMPTY))
            is_reached = is_reached and (over.median >= GOAL or beyond <= NEAR_MS)
            print(
                f"{turns.name} {case.name}{place}: MLflow takes {over} times as long, ours {beyond:.2f} ms more than "
                f"{EMPTY}; goal {GOAL:g} times or {NEAR_MS:g} ms",
                flush=True,
            )
        if case.deep:
            flat = turns.ratio(f"ours, {case.name}, deep", f"ours, {case.name}")
            is_reached = is_reached and flat.median <= GOAL_FLAT
            print(f"{turns.name} {case.name}: ours takes {flat} times as long behind the half; goal {GOAL_FLAT:g}")
    turns = Turns(f"C4 {size:>9,}", BLOCKS)
    lanes = {EMPTY: ours.empty()}
    lanes |= {name: ours.get("/v1/runs", {"limit": str(PAGE), **query}) for name, query in PAGES.items()}
    lanes |= {name: ours.get("/v1/runs/counts", query) for name, query in COUNTS.items()}
    turns.take(lanes)
    for name in lanes:
        turns.show(name)
    turns = Turns(f"C4 {size:>9,}", BLOCKS)
    lists = {"list of runs": "/v1/runs", "list of OpenAI's jobs": "/openai/v1/fine_tuning/jobs"}
    turns.take({name: ours.get(path, {"limit": str(PAGE)}) for name, path in lists.items()})
    for name in lists:
        turns.show(name)
    slower = turns.ratio("list of OpenAI's jobs", "list of runs")
    print(
        f"{turns.name} the list of OpenAI's jobs takes {slower} times as long as that of runs; goal {GOAL_JOBS:g}",
        flush=True,
    )
    return is_reached and slower.median <= GOAL_JOBS


class Ours:
    """Copies of one created run, which differ in the columns that lists use."""

    def __init__(self, service: Stack) -> None:
        self._service = service
        self._filled = 0
        self._model = service.create(config={"base_model": "any"})
        assert service.stop(self._model).status_code == 202  # no worker is needed
        self._experiments = [
            service.client.post("/v1/experiments", json={"name": f"experiment {n}"}).json()["id"]
            for n in range(EXPERIMENTS)
        ]
        # Ids of one timestamp that sort by their number, whose digits are valid base32.
        self._prefix = new_id("run")[:14]

    def fill(self, size: int) -> None:
        """Insert runs: 70 % completed, the others failed or cancelled, a few live."""
        status = (
            "CASE WHEN mod(n, 10000) = 1 THEN 'running' WHEN mod(n, 10) < 7 THEN 'completed' "
            "WHEN mod(n, 10) < 9 THEN 'failed' ELSE 'cancelled' END"
        )
        different = {
            "id": f"'{self._prefix}' || lpad(n::text, 16, '0')",
            "experiment_id": "(cast(%(experiments)s AS text[]))[1 + mod(n / 10, 10)]",
            "name": "'run ' || n",
            "tags": f"jsonb_build_array('team-' || mod(n / 10, {TEAMS})) || "
            f"CASE WHEN mod(n, {RARE}) = 5 THEN '[\"rare\"]'::jsonb ELSE '[]'::jsonb END",
            "effective_config": "model.config",
            "idempotency_key": "NULL",
            "status": "made.status",
            "attempt": "1",
            "lease_epoch": "1",
            "worker_id": "'wrk_00000000000000000000000000'",
            "lease_owner": "CASE WHEN made.status = 'running' THEN 'wrk_00000000000000000000000000' END",
            "lease_expires_at": "CASE WHEN made.status = 'running' THEN now() + interval '1 day' END",
            "stop_requested_at": "CASE WHEN made.status = 'cancelled' THEN now() END",
            "error_code": "CASE WHEN made.status = 'failed' THEN 'internal' END",
            "error_message": "CASE WHEN made.status = 'failed' THEN 'it broke' END",
            "current_step": "1000",
            "total_steps": "1000",
            "best_loss": "made.loss",
            # The trigger sets this when a run ends.
            "final_loss": "CASE WHEN made.status <> 'running' THEN made.loss END",
            "created_at": "now() - interval '30 days' + n * interval '1 second'",
            "started_at": "now()",
            "finished_at": "CASE WHEN made.status <> 'running' THEN now() END",
        }
        columns = [column.name for column in Run.__table__.columns if column.computed is None]
        chosen = ", ".join(different.get(name, f'model."{name}"') for name in columns)
        names = ", ".join(f'"{name}"' for name in columns)
        checkpoints = (
            "INSERT INTO checkpoints (id, run_id, attempt, name, step, epoch, kind, bytes, manifest_sha256) "
            "SELECT 'ckpt' || substr(id, 4), id, 1, 'checkpoint-1000', 1000, 1, 'final', 1000, repeat('0', 64) "
            "FROM runs WHERE id > %(prefix)s || lpad(%(low)s, 16, '0') AND id LIKE %(prefix)s || '%%'"
        )
        values = {"prefix": self._prefix, "low": str(self._filled)}
        with psycopg.connect(self._service.settings.database_url or "", autocommit=True) as connection:
            connection.execute(
                f"INSERT INTO runs ({names}) SELECT {chosen} FROM (SELECT n, {status} AS status, "
                "1 + 3 * random() AS loss FROM generate_series(%(low)s::bigint + 1, %(high)s) AS n) AS made "
                "CROSS JOIN (SELECT * FROM runs WHERE id = %(model)s) AS model",
                {**values, "high": size, "experiments": self._experiments, "model": self._model},
            )
            connection.execute(checkpoints, values)
            connection.execute("VACUUM (ANALYZE) runs, checkpoints")
        self._filled = size

    def half(self, case: Case) -> str:
        """Return the last run of the page before the middle."""
        order = "final_loss, id" if "sort" in case.ours else "id DESC"
        query = f"SELECT id FROM runs WHERE final_loss IS NOT NULL ORDER BY {order} OFFSET %s LIMIT 1"
        with psycopg.connect(self._service.settings.database_url or "") as connection:
            row = connection.execute(query, (self._filled // 2,)).fetchone()
        assert row is not None
        return str(row[0])

    def empty(self) -> Lane:
        """Measure the lower bound."""
        return self.get("/healthz", {})

    def get(self, path: str, query: Mapping[str, str | None]) -> Lane:
        """Measure a request of a page; `experiment_id` is filled in."""
        parameters = {name: self._experiments[3] if name == "experiment_id" else value for name, value in query.items()}

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text

        return Lane(lambda: self._service.client.get(path, params=parameters), CALLS, check=check)

    def lane(self, case: Case, after: str | None = None) -> Lane:
        """Measure one page over HTTP."""
        query = {"limit": str(PAGE), **case.ours, **({"after": after} if after else {})}
        if case.one_experiment:
            query["experiment_id"] = self._experiments[3]
        count = _count(case, self._filled)

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text
            runs = answer.json()["data"]
            assert len(runs) == count and all(case.shows(run) for run in runs), (case, len(runs), count)
            keys = [run["best_loss"] if "sort" in case.ours else run["id"] for run in runs]
            assert keys == sorted(keys, reverse="sort" not in case.ours)

        return Lane(lambda: self._service.client.get("/v1/runs", params=query), CALLS, check=check)


def _count(case: Case, runs: int) -> int:
    """Return the expected page size: runs 5, 10,005, … are rare."""
    return min(PAGE, -((5 - runs) // RARE)) if case.ours.get("tag") == "rare" else PAGE


class Theirs:
    """The same runs in MLflow's tables."""

    def __init__(self, mlflow: Mlflow) -> None:
        self._mlflow = mlflow
        self._filled = 0
        self._experiments = [mlflow.client.create_experiment(f"experiment {n}") for n in range(EXPERIMENTS)]

    def fill(self, size: int) -> None:
        """Insert the runs."""
        series = f"generate_series({self._filled} + 1, {size}) AS n"
        run_id = "lpad(n::text, 32, '0')"
        experiments = ", ".join(self._experiments)
        with self._mlflow.connection() as connection:
            connection.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, "
                "start_time, end_time, source_version, lifecycle_stage, artifact_uri, experiment_id) "
                f"SELECT {run_id}, 'run ' || n, 'LOCAL', '', '', 'bench', CASE WHEN mod(n, 10000) = 1 THEN 'RUNNING' "
                "WHEN mod(n, 10) < 7 THEN 'FINISHED' WHEN mod(n, 10) < 9 THEN 'FAILED' ELSE 'KILLED' END, "
                "1700000000000 + n * 1000, 1700000100000 + n * 1000, '', 'active', 'file:///none', "
                f"(ARRAY[{experiments}])[1 + mod(n / 10, {EXPERIMENTS})] FROM {series}"
            )
            for key, value, where in (
                ("mlflow.runName", "'run ' || n", "true"),
                ("team", f"'team-' || mod(n / 10, {TEAMS})", "true"),
                ("rare", "'rare'", f"mod(n, {RARE}) = 5"),
            ):
                connection.execute(
                    f"INSERT INTO tags (key, value, run_uuid) SELECT '{key}', {value}, {run_id} FROM {series} "
                    f"WHERE {where}"
                )
            for key, value in (("base_model", "'any'"), ("learning_rate", "'0.0002'")):
                connection.execute(
                    f"INSERT INTO params (key, value, run_uuid) SELECT '{key}', {value}, {run_id} FROM {series}"
                )
            connection.execute(
                "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
                f"SELECT 'loss', 1 + 3 * random(), 1700000000000, 1000, false, {run_id} FROM {series}"
            )
            connection.execute("VACUUM (ANALYZE) runs, tags, params, latest_metrics")
        self._filled = size

    def lane(self, case: Case, offset: int = 0) -> Lane:
        """Measure one page with MLflow's client."""
        from mlflow.utils.search_utils import SearchUtils

        token = SearchUtils.create_page_token(offset).decode() if offset else None
        experiments = [self._experiments[3]] if case.one_experiment else self._experiments
        count = _count(case, self._filled)

        def check(runs: Any) -> None:
            assert len(runs) == count

        return Lane(
            lambda: self._mlflow.client.search_runs(experiments, max_results=PAGE, page_token=token, **case.theirs),
            PEER_CALLS,
            check=check,
        )

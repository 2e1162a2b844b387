"""Lists of runs in every order and by every filter, page by page, against all runs sorted in Python."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, func, insert, text, update

from anneal.contracts.run_status import TERMINAL
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.runs.reading.queries import READ_IN_PARTS
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from tests.factories import make_dataset, make_experiment, make_run
from tests.rows import add_worker, run_row
from tests.server import ApiServer

_EXTRAS: tuple[dict[str, Any], ...] = ({}, {}, {"steps": 9}, {"probe": False}, {"probe": True})
_RATES: tuple[Any, ...] = (1e-4, 2e-4, 0, "many", None, 10**400, 1)
_STATUSES = ("pending", "running", "completed", "failed", "cancelled")


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def stored_runs(engine: Engine) -> list[dict[str, Any]]:
    """Two hundred runs of every kind, oldest first."""
    chance = random.Random(5)
    experiments = [make_experiment(engine) for _ in range(3)]
    dataset, worker = make_dataset(engine), add_worker(engine)
    rows: list[dict[str, Any]] = []
    minutes_of_runs: dict[int, int | None] = {}
    for _ in range(200):
        status = chance.choice(_STATUSES)
        live, ended = status == "running", status in TERMINAL
        loss = chance.choice([None, 1.0, round(chance.random(), 2)]) if status != "pending" else None
        score = chance.choice([None, None, 1.0, -round(chance.random(), 2)]) if status != "pending" else None
        minutes = chance.randrange(3) if ended else 0
        minutes_of_runs[len(rows)] = minutes or None
        rows.append(
            {
                "id": new_id("run"), "experiment_id": chance.choice(experiments), "dataset_id": dataset,
                "name": chance.choice(["a run", "b run", "c run"]), "backend": "fake",
                "config": {"base_model": chance.choice(["a", "b"]), "method": chance.choice(["full", "rlhf"]),
                           "extra": chance.choice(_EXTRAS), "learning_rate": chance.choice(_RATES)},
                "effective_config": chance.choice([None, {}, {"learning_rate": 3e-4}]),
                "current_step": chance.randrange(4),
                "started_at": text(f"now() - interval '{minutes} minutes'") if minutes else None,
                "user_set_fields": [], "status": status,
                "tags": chance.sample(["x", "y", "z"], chance.randrange(3)), "attempt": int(status != "pending"),
                "lease_epoch": 1, "best_loss": loss, "final_loss": loss if ended else None,
                "best_score": score, "final_score": score if ended else None,
                "finished_at": func.now() if ended else None, "lease_owner": worker if live else None,
                "lease_expires_at": text("now() + interval '1 day'") if live else None,
                "not_before": text("now() + interval '1 day'"),  # the dispatcher writes no reason to wait
                "stop_requested_at": func.now() if status == "cancelled" else None,
                "error_code": "internal" if status == "failed" else None,
            }
        )  # fmt: skip
    with engine.begin() as connection:
        for row in rows:
            connection.execute(insert(Run).values(row))
    return [{**row, "minutes": minutes_of_runs[place]} for place, row in enumerate(rows)]


def listed(api: ApiServer, limit: int, **query: Any) -> list[str]:
    """All ids, page by page."""
    run_ids: list[str] = []
    while True:
        after = {"after": run_ids[-1]} if run_ids else {}
        answer = api.client.get("/v1/runs", params={"limit": limit, **query, **after})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        run_ids += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            return run_ids
        assert len(page["data"]) == limit


def _by_result(row: dict[str, Any]) -> Any:
    method, score, loss = row["config"]["method"], row["best_score"], row["best_loss"]
    if score is None and loss is None:
        return (1, _reversed(row["id"]))
    return (0, method, 0, score, row["id"]) if score is not None else (0, method, 1, loss, row["id"])


def _reversed(id: str) -> tuple[int, ...]:
    return tuple(-ord(letter) for letter in id)


@pytest.mark.parametrize("seed", range(6))
def test_every_page_of_every_order_and_filter(
    shared_api: ApiServer, stored_runs: list[dict[str, Any]], seed: int
) -> None:
    chance = random.Random(seed)
    query: dict[str, Any] = {}
    rows = list(stored_runs)
    if chance.random() < 0.5:
        query["status"] = chance.sample(_STATUSES, chance.randrange(1, 4))
        rows = [row for row in rows if row["status"] in query["status"]]
    if chance.random() < 0.5:
        query["experiment_id"] = stored_runs[0]["experiment_id"]
        rows = [row for row in rows if row["experiment_id"] == query["experiment_id"]]
    if chance.random() < 0.3:
        query["tag"] = "x"
        rows = [row for row in rows if "x" in row["tags"]]
    if chance.random() < 0.3:
        query["base_model"] = "b"
        rows = [row for row in rows if row["config"]["base_model"] == "b"]
    if chance.random() < 0.3:
        query["method"] = "rlhf"
        rows = [row for row in rows if row["config"]["method"] == "rlhf"]
    if seed % 2:
        query["sort"] = "best"
        # The loss of a probe, two steps on the longest rows, is no result.
        rows = sorted((row for row in rows if row["config"]["extra"].get("probe") is not True), key=_by_result)
    else:
        rows.sort(key=lambda row: row["id"], reverse=True)
    assert listed(shared_api, chance.choice([1, 3, 7, 50]), **query) == [row["id"] for row in rows]


_LIVE_FIRST = {"running": 0, "pending": 1}


def _rate(row: dict[str, Any]) -> float | None:
    rate = (row["effective_config"] or {}).get("learning_rate", row["config"]["learning_rate"])
    return rate if isinstance(rate, int | float) and rate < 1e30 else None


def _eval(row: dict[str, Any]) -> float | None:
    score = row["best_score"]
    return -score if score is not None and row["config"]["method"] == "rlhf" else score


_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda row: row["name"], "step": lambda row: row["current_step"], "best_loss": lambda row: row["best_loss"],
    "best_eval": _eval, "learning_rate": _rate, "seconds": lambda row: row["minutes"],
    "created_at": lambda row: row["id"],
}  # fmt: skip


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", _VALUES)
def test_every_page_by_a_value_has_equal_ones_newest_first_and_those_without_it_last(
    shared_api: ApiServer, stored_runs: list[dict[str, Any]], sort: str, order: str
) -> None:
    newest_first = sorted(
        (row for row in stored_runs if row["status"] != "failed"), key=lambda row: row["id"], reverse=True
    )
    known = [row for row in newest_first if _VALUES[sort](row) is not None]
    known.sort(key=_VALUES[sort], reverse=order == "desc")
    # Reversing keeps the order of equal ones.
    rows = known + [row for row in newest_first if _VALUES[sort](row) is None]
    statuses = [status for status in _STATUSES if status != "failed"]
    assert listed(shared_api, 29, sort=sort, order=order, status=statuses) == [row["id"] for row in rows]


def test_running_run_is_not_listed_again_behind_itself_as_its_time_grows(
    shared_api: ApiServer, engine: Engine, stored_runs: list[dict[str, Any]]
) -> None:
    experiment, running = make_experiment(engine), next(row for row in stored_runs if row["status"] == "running")
    ids = [new_id("run") for _ in range(2)]
    with engine.begin() as connection:
        for minutes, run_id in enumerate(ids, 1):
            started_at = text(f"now() - interval '{minutes} minutes'")
            values = {name: running[name] for name in running.keys() - {"minutes"}}
            values |= {"id": run_id, "experiment_id": experiment, "started_at": started_at}
            connection.execute(insert(Run).values(values))
    query = {"sort": "seconds", "order": "asc", "experiment_id": experiment, "limit": 1}
    first = shared_api.client.get("/v1/runs", params=query).json()
    assert [run["id"] for run in first["data"]] == ids[:1]
    second = shared_api.client.get("/v1/runs", params={**query, "after": ids[0]}).json()
    assert ([run["id"] for run in second["data"]], second["has_more"]) == (ids[1:], False)
    with engine.begin() as connection:
        connection.execute(delete(Run).where(Run.id.in_(ids)))


def test_running_runs_come_first_then_those_that_wait(shared_api: ApiServer, stored_runs: list[dict[str, Any]]) -> None:
    for statuses in ([], ["pending", "failed", "completed"]):
        rows = [row for row in reversed(stored_runs) if not statuses or row["status"] in statuses]
        rows.sort(key=lambda row: _LIVE_FIRST.get(row["status"], 2))
        assert listed(shared_api, 23, sort="live", status=statuses) == [row["id"] for row in rows]
    for sort in ("live", "best"):
        answer = shared_api.client.get("/v1/runs", params={"sort": sort, "order": "asc"})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "order")


@pytest.mark.parametrize(("before", "after"), [("running", "completed"), ("pending", "running")])
def test_a_run_whose_status_changes_while_a_page_is_read_is_on_it_once(
    shared_api: ApiServer, engine: Engine, stored_runs: list[dict[str, Any]], before: str, after: str
) -> None:
    experiment = make_experiment(engine)
    row = next(row for row in stored_runs if row["status"] == before)
    leased = {"lease_owner": add_worker(engine), "lease_expires_at": text("now() + interval '1 day'"), "attempt": 1}
    values = {**row, "id": new_id("run"), "experiment_id": experiment} | (leased if before == "running" else {})
    values = {name: value for name, value in values.items() if name in Run.__table__.c}
    released = {"lease_owner": None, "lease_expires_at": None, "finished_at": func.now()}
    change = (
        update(Run).where(Run.id == values["id"]).values(status=after, **(leased if after == "running" else released))
    )
    listed_first: list[str] = []

    def change_between(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM runs" in statement and "json_agg" in statement and not listed_first:
            listed_first.append(statement)
            with engine.begin() as connection:
                connection.execute(change)

    with engine.begin() as connection:
        connection.execute(insert(Run).values(values))
    event.listen(Engine, "after_cursor_execute", change_between)
    try:
        page = shared_api.client.get("/v1/runs", params={"sort": "live", "experiment_id": experiment}).json()
    finally:
        event.remove(Engine, "after_cursor_execute", change_between)
        with engine.begin() as connection:
            connection.execute(delete(Run).where(Run.id == values["id"]))
    assert listed_first
    assert [(run["id"], run["status"]) for run in page["data"]] == [(values["id"], before)]


def test_a_cursor_that_is_gone_is_refused_where_its_place_is_not_known(shared_api: ApiServer) -> None:
    for sort in ("best", "live", "name"):
        answer = shared_api.client.get("/v1/runs", params={"sort": sort, "after": new_id("run")})
        assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "unknown_cursor")


def test_the_loss_of_a_run_that_ends_is_set_by_the_database(engine: Engine, stored_runs: list[dict[str, Any]]) -> None:
    running = next(row for row in stored_runs if row["status"] == "running" and row["best_loss"] is not None)
    end = text(
        "UPDATE runs SET status = 'completed', finished_at = now(), lease_owner = NULL, lease_expires_at = NULL "
        "WHERE id = :id"
    )
    try:
        with engine.begin() as connection:
            connection.execute(end, {"id": running["id"]})
        row = run_row(engine, running["id"])
        assert (row.final_loss, row.final_score) == (running["best_loss"], running["best_score"])
    finally:
        running["status"] = "completed"


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"experiment_id": "exp_" + "0" * 26},
        {"status": "failed"},
        {"base_model": "a"},
        {"sort": "best"},
        {"sort": "best", "experiment_id": "exp_" + "0" * 26},
        {"sort": "live"},
        {"sort": "live", "status": "failed"},
        {"sort": "name"},
    ],
    ids=str,
)
def test_no_list_reads_all_runs_or_sorts_more_than_a_page(
    shared_api: ApiServer, engine: Engine, stored_runs: list[dict[str, Any]], query: dict[str, Any]
) -> None:
    """By the plans that Postgres makes when it may not read the whole table."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        # Now and then a forecast is made of what waits, which is sorted whole.
        if "FROM runs" in statement and "known(owner" not in statement:
            statements.append((statement, parameters))

    state = shared_api.application.state
    listing = state.snapshot_engine if query.get("sort") in READ_IN_PARTS else state.reading_engine
    event.listen(listing.sync_engine, "before_cursor_execute", note)
    try:
        assert shared_api.client.get("/v1/runs", params=query).status_code == 200
    finally:
        event.remove(listing.sync_engine, "before_cursor_execute", note)
    assert statements
    with engine.connect() as connection:
        connection.exec_driver_sql("SET enable_seqscan = off; SET enable_bitmapscan = off")
        for statement, parameters in statements:
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
            assert "Seq Scan" not in plan, plan
            # The page is sorted at last, and those that train; nothing else is.
            assert plan.count("Sort Key") <= (3 if "sort" in query else 0), plan


def test_a_run_in_a_list_has_what_the_run_alone_has(
    shared_api: ApiServer, engine: Engine, stored_runs: list[dict[str, Any]]
) -> None:
    odd = {
        "name": "Grüße \"1\"\n\u2028", "tags": ["ä", '"'],
        "config": {"base_model": "a", "method": "rlhf", "extra": {"x": ["\\"]}},
        "effective_config": {"epochs": 1}, "best_loss": float("nan"), "best_score": -1.5, "current_epoch": 0.1,
        "output_attempt": 1,
    }  # fmt: skip
    ended = [row["id"] for row in stored_runs if row["status"] == "completed"]
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == ended[0]).values(**odd))
        for step in (10, 20):
            checkpoint = {"id": new_id("ckpt"), "run_id": ended[1], "attempt": 1, "name": "c", "step": step, "epoch": 1}
            files = {"kind": "periodic", "bytes": 1, "manifest_sha256": "a" * 64}
            connection.execute(insert(Checkpoint).values(**checkpoint, **files))
    # A forecast of before these rows would be shown in the list, and a newer one for the run alone.
    shared_api.application.state.eta._made_at = float("-inf")
    answers = {
        view: shared_api.client.get("/v1/runs", params={"limit": 200, "view": view}) for view in ("full", "summary")
    }
    assert {answer.headers["content-type"] for answer in answers.values()} == {"application/json"}
    shown = {run["id"]: run for run in answers["full"].json()["data"]}
    lean = {run["id"]: run for run in answers["summary"].json()["data"]}
    assert shown[ended[0]]["name"] == odd["name"] and shown[ended[0]]["best_loss"] is None
    assert shown[ended[0]]["best_eval"] == 1.5
    assert shown[ended[1]]["checkpoint_path"].endswith(f"runs/{ended[1]}/a1/checkpoint-20")
    for run_id in [ended[0], ended[1], *(row["id"] for row in stored_runs[::20])]:
        alone = shared_api.client.get(f"/v1/runs/{run_id}").json()
        for only_alone in (
            "metrics_history",
            "facts",
            "estimate",
            "measured",
            "probe",
            "evaluation",
            "replaced",
            "warnings",
        ):
            del alone[only_alone]
        assert shown[run_id] == alone
        assert lean[run_id] == {name: alone[name] for name in lean[run_id]} and "config" not in lean[run_id]


def test_runs_on_a_dataset_are_those_that_train_or_evaluate_on_it(shared_api: ApiServer, engine: Engine) -> None:
    trained, evaluated, extra, unused = (make_dataset(engine) for _ in range(4))
    more = {"eval_dataset_id": evaluated, "extra_eval_datasets": {"code": extra}, "config": {"eval_steps": 5}}
    run = make_run(shared_api.client, trained, name="on three datasets", **more)["id"]
    for dataset, expected in ((trained, [run]), (evaluated, [run]), (extra, [run]), (unused, [])):
        assert listed(shared_api, 50, dataset_id=dataset) == expected

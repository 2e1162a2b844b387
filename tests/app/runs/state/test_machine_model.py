"""Any order of calls, alone or two at once, by workers who are right or out of date: the database does what it must.

A model in memory (tests/app/runs/state/model.py) says before each call what has to come of it; afterwards every run,
event, attempt and device is compared. `make properties` tries many more examples.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Engine, text

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import new_id
from tests.app.runs.state.calls import Call, Offer
from tests.app.runs.state.model import ENDED, LIVE, Model
from tests.properties import TIMES, examples
from tests.rows import add_worker, parents

_STATE = text(
    """
    SELECT
    (SELECT json_object_agg(id, json_build_object(
        'status', status, 'lease_epoch', lease_epoch, 'attempt', attempt, 'lost_count', lost_count,
        'owner', lease_owner,
        'stop', stop_requested_at IS NOT NULL, 'save', coalesce(stop_mode, '') NOT IN ('best', 'discard'),
        'hinted', coalesce(notified_at > clock_timestamp() - interval '30 s', false),
        'expired', coalesce(lease_expires_at < clock_timestamp(), false), 'stored', attempt_event_count,
        'step', current_step,
        'best_loss', best_loss, 'checkpoint_step', checkpoint_step, 'output_attempt', output_attempt,
        'error', error_code, 'event_seq', event_seq)) FROM runs),
    (SELECT json_object_agg(run_id, all_of_it) FROM (
        SELECT run_id, json_agg(json_build_array(seq, type, attempt, data) ORDER BY seq) AS all_of_it
        FROM run_events GROUP BY run_id) AS e),
    (SELECT json_object_agg(run_id, all_of_it) FROM (
        SELECT run_id, json_agg(json_build_object('lease_epoch', lease_epoch, 'worker', worker_id,
            'start_step', start_step, 'outcome', outcome) ORDER BY attempt) AS all_of_it
        FROM run_attempts GROUP BY run_id) AS a),
    (SELECT json_agg(json_build_array(worker_id, index, run_id, lease_epoch) ORDER BY worker_id, index) FROM devices)
    """
)
_COMPARED = (
    "status", "lease_epoch", "attempt", "lost_count", "owner", "stop", "save", "hinted", "expired", "stored", "step",
    "best_loss", "checkpoint_step", "output_attempt", "error",
)  # fmt: skip
_CHAIN = {
    None: ("pending",),
    "pending": ("initializing", "cancelled"),
    "initializing": ("running", "pending", *ENDED),
    "running": ("checkpointing", "pending", *ENDED),
    "checkpointing": ("running", "pending", *ENDED),
}

# Which run (of those that there are), and by how much the caller's epoch is out of date.
_WHOSE = {"run": st.integers(0, 3), "stale": st.sampled_from([0, 0, 0, 1])}


def _verb(name: str, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"verb": st.just(name), **more})


_WORKER = st.integers(0, 2)
_CLAIM = _verb("claim", worker=_WORKER)
_APPEND = _verb("append", **_WHOSE, back=st.integers(-1, 4), count=st.integers(1, 5), step=st.integers(0, 9))
_ENDS = st.sampled_from(["complete", "fail", "cancel"]).flatmap(lambda name: _verb(name, **_WHOSE))
_STOP = _verb("request_stop", **_WHOSE, save=st.booleans())
_CALL = st.one_of(
    _CLAIM,
    _CLAIM,
    st.sampled_from(["begin", "saving", "saved"]).flatmap(lambda name: _verb(name, **_WHOSE)),
    _APPEND,
    _APPEND,
    _verb("checkpoint", **_WHOSE, step=st.integers(1, 99)),
    _ENDS,
    _verb("release", **_WHOSE),
    _verb("retry", **_WHOSE, delay=st.sampled_from([0.0, 10.0])),
    _verb("renew", **_WHOSE),
    _STOP,
    _STOP,
    _verb("request_stop_at_epoch_end", **_WHOSE),
    _verb("request_stop_at_epoch_end", **_WHOSE),
    _verb("reap"),
    _verb("reap_dead", worker=_WORKER),
    _verb("hint_due", limit=st.integers(1, 3)),
)


class RunMachine(RuleBasedStateMachine):
    """The rules; `database` is what they work on."""

    database: "Database"

    @initialize(waiting=st.integers(1, 2), claims=st.integers(0, 2))
    def start(self, waiting: int, claims: int) -> None:
        """Some runs that any worker could train; some of them are claimed, and their trainers have said something."""
        self.workers = self.database.clear()
        self.model = Model(self.workers)
        self.last: Call | None = None
        self.ended: dict[str, dict[str, Any]] = {}
        for _ in range(waiting):
            self.create(priority=0, backend="fake", devices_needed=1, requirements={}, max_restarts=1)
        for _ in range(claims):
            self._alone(Call("claim", worker=self.workers[2]))
        for run in self._live():
            self._alone(Call("append", run=run.id, lease_epoch=run.lease_epoch, first=1, count=2))

    @precondition(lambda self: len(self.model.runs) < 4)
    @rule(
        priority=st.integers(-1, 1),
        backend=st.sampled_from(["fake", "fake", "celery"]),
        devices_needed=st.sampled_from([1, 1, 1, 2, 3]),
        requirements=st.sampled_from(
            [
                {},
                {},
                {},
                {"kind": "cuda"},
                {"kind": "cpu"},
                {"memory_mb": 2000},
                {"gpu": "cuda"},
                {"gpu": "h200"},
                {"labels": ["b"]},
                {"labels": ["a", "b"]},
                {"prefers_gpu": True},
                {"estimated_mb": {"cpu": 900, "cuda": 2000}},
                {"memory_mb": 500, "estimated_mb": {"cpu": 2000, "cuda": 500}},
            ]
        ),
        max_restarts=st.integers(0, 2),
    )
    def create(self, **values: Any) -> None:
        """The API takes a run."""
        self._alone(Call("create", run=new_id("run"), values=tuple(values.items())))

    @precondition(lambda self: self.model.runs)
    @rule(drawn=_CALL)
    def do(self, drawn: dict[str, Any]) -> None:
        """One call, from its start to its commit."""
        self._alone(self._bind(drawn))

    @precondition(lambda self: self.last)
    @rule()
    def again(self) -> None:
        """The commit of the last call happened, its answer got lost: the caller does the same again."""
        assert self.last
        self._alone(self.last)

    @precondition(lambda self: self.model.runs)
    @rule(first_drawn=_CALL, second_drawn=_CALL, together=st.booleans(), commits=st.booleans(), resent=st.booleans())
    def do_two_at_once(
        self, first_drawn: dict[str, Any], second_drawn: dict[str, Any], together: bool, commits: bool, resent: bool
    ) -> None:
        """While one call's transaction is open another is made; then the first is committed or rolled back.

        `together`: for the same run, or the same events once more with others behind them.
        `resent`: the first is made once more, by a caller who heard no answer.
        """
        if together and first_drawn["verb"] == "append":
            second_drawn = {**first_drawn, "count": first_drawn["count"] + 1}
        elif together:
            second_drawn = {
                **second_drawn,
                **{
                    name: first_drawn[name]
                    for name in ("run", "worker")
                    if name in first_drawn and name in second_drawn
                },
            }
        first, second = self._bind(first_drawn), self._bind(second_drawn)
        before, with_first = self.model.copy(), self.model.copy()
        expected = with_first.apply(first)
        # A statement that Postgres refuses lets go of its locks at once.
        locked = before.locks(first) if expected != "refused" else set()
        waits = before.waits(second, first, locked)
        commits = commits and expected not in ("refused", "fenced", "gap")
        base = with_first if commits else before
        began = datetime.now(UTC)
        with self.database.engine.connect() as connection:
            assert first.make(connection, self.database.parents) == expected
            future = self.database.submit(second)
            waited = self.database.is_blocked(future)
            note(f"{first} open, {second} {'waits' if waited else 'does not wait'}, first is committed: {commits}")
            assert waited == waits
            if waited:
                self.model = base
            (connection.commit if commits else connection.rollback)()
        if waited:
            expected = self.model.apply(second)
        else:
            beside = before.copy()
            expected = beside.apply(second, locked=locked)
            untouched = before.copy()
            self.model = base
            self.model.join(untouched, beside)
        assert future.result(30) == expected
        self._settle(began)
        if resent:
            self._alone(first)

    @precondition(lambda self: self._live())
    @rule(which=st.integers(0, 3))
    def a_lease_runs_out(self, which: int) -> None:
        """A worker stands still for longer than its lease."""
        live = self._live()
        run = live[which % len(live)]
        self.database.change("lease_expires_at = clock_timestamp() - interval '1 s'", run.id)
        run.expired = True

    @precondition(lambda self: self._waiting())
    @rule()
    def time_passes(self) -> None:
        """Every pause is over, and every hint is old enough to be given again."""
        for run in self._waiting():
            self.database.change("not_before = now() - interval '1 s', notified_at = now() - interval '31 s'", run.id)
            run.paused, run.hinted = False, False

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        runs, events, attempts, devices = self.database.state()
        assert runs.keys() == self.model.runs.keys()
        for run_id, run in self.model.runs.items():
            row, log = runs[run_id], events[run_id]
            assert {name: row[name] for name in _COMPARED} == {name: getattr(run, name) for name in _COMPARED}
            self._check_log(row, log)
            assert len(log) == len(run.events)
            for (_, kind, attempt, data), (kind_wanted, attempt_wanted, data_wanted) in zip(
                log, run.events, strict=True
            ):
                assert (kind, attempt) == (kind_wanted, attempt_wanted)
                assert data_wanted.items() <= data.items()
            assert attempts.get(run_id, []) == run.attempts
            if row["status"] in ENDED:
                assert self.ended.setdefault(run_id, row) == row
        held = {(worker, index): (run, lease_epoch) if run else None for worker, index, run, lease_epoch in devices}
        assert held == self.model.devices
        owners = {run for run, *_ in filter(None, held.values())}
        assert owners == {run_id for run_id, row in runs.items() if row["status"] in LIVE}

    def _check_log(self, row: dict[str, Any], log: list[Any]) -> None:
        """What must hold of every event log, whatever the model says."""
        assert [seq for seq, *_ in log] == list(range(1, row["event_seq"] + 1))
        assert row["stored"] <= row["event_seq"]
        previous = None
        for _, kind, _, data in log:
            if kind == "status":
                assert data["from"] == previous and data["to"] in _CHAIN[previous]
                previous = data["to"]
        assert previous == row["status"]
        ends = [seq for seq, kind, *_ in log if kind == "end"]
        assert ends == ([row["event_seq"]] if previous in ENDED else [])
        assert not (row["stop"] and previous == "pending")

    def _alone(self, call: Call) -> None:
        note(f"{call}")
        began = datetime.now(UTC)
        expected = self.model.apply(call)
        with self.database.engine.connect() as connection:
            assert call.make(connection, self.database.parents) == expected
            (connection.rollback if expected in ("refused", "fenced", "gap") else connection.commit)()
        self._settle(began)
        self.last = call

    def _settle(self, began: datetime) -> None:
        """Check the pauses that were just given, and hold them and the hints until `time_passes`."""
        for run in self.model.runs.values():
            if run.hinted and run.status == "pending":
                self.database.change("notified_at = now() + interval '1 d'", run.id)
            if run.pause is None:
                continue
            pause, run.pause = run.pause, None
            seconds = self.database.pause_of(run.id, began)
            assert pause - 0.01 <= seconds <= pause + (datetime.now(UTC) - began).total_seconds() + 0.01
            if run.paused:
                self.database.change("not_before = now() + interval '1 d'", run.id)

    def _live(self) -> list[Any]:
        return [run for run in self.model.runs.values() if run.live] if hasattr(self, "model") else []

    def _waiting(self) -> list[Any]:
        runs = self.model.runs.values() if hasattr(self, "model") else []
        return [run for run in runs if run.status == "pending" and (run.paused or run.hinted)]

    def _bind(self, drawn: dict[str, Any]) -> Call:
        """The call that a caller makes who knows the run as it is now, or as it was some epochs ago."""
        drawn = dict(drawn)
        if "worker" in drawn:
            drawn["worker"] = self.workers[drawn["worker"]]
        if "run" in drawn:
            # Most calls are about a run that somebody trains.
            runs = (self._live() if drawn["run"] < 3 else []) or list(self.model.runs.values())
            run = runs[drawn["run"] % len(runs)]
            drawn |= {"run": run.id, "lease_epoch": run.lease_epoch - drawn.pop("stale")}
            if drawn["verb"] in ("append", "checkpoint"):
                drawn["first"] = max(run.stored + 1 - drawn.pop("back", 0), 1)
                drawn.setdefault("count", 1)
        return Call(**drawn)


class Database:
    """The database of the machine: emptied for each example, and looked at as a whole."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.begin() as connection:
            experiment, dataset = parents(connection)
        self.parents = {
            "experiment_id": experiment, "dataset_id": dataset, "name": "a run",
            "config": {"base_model": "none", "method": "sft", "extra": {}}, "user_set_fields": ["base_model"],
        }  # fmt: skip
        self._second = ThreadPoolExecutor(1)
        self._connection: Connection = engine.connect()
        self._looking: Connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver = self._connection.connection.driver_connection
        assert driver
        self._pid = driver.info.backend_pid

    def close(self) -> None:
        """End the second caller."""
        self._second.shutdown()
        self._connection.close()
        self._looking.close()

    def clear(self) -> list[Offer]:
        """No run any more, and three fresh workers."""
        for table in ("checkpoints", "run_attempts", "run_events", "runs", "devices", "workers"):
            self._looking.execute(text(f"DELETE FROM {table}"))
        return [
            self._worker(1, ("fake", "celery"), "cpu", 1000),
            self._worker(2, ("fake",), "cuda", 24_000, "a", "b"),
            self._worker(3, ("celery", "fake"), "cpu", None),
        ]

    def _worker(self, devices: int, backends: tuple[str, ...], kind: str, memory_mb: int | None, *labels: str) -> Offer:
        memory = [memory_mb] * devices
        worker_id = add_worker(self.engine, kind=kind, memory_mb=memory, backends=list(backends), labels=list(labels))
        return Offer(worker_id, backends, kind, memory_mb, devices, labels)

    def state(self) -> tuple[Any, ...]:
        """Runs, events, attempts and devices."""
        return tuple(part or {} for part in self._looking.execute(_STATE).one())

    def change(self, what: str, run_id: str) -> None:
        """Turn a clock of a run."""
        self._looking.execute(text(f"UPDATE runs SET {what} WHERE id = :id"), {"id": run_id})

    def pause_of(self, run_id: str, since: datetime) -> float:
        """Seconds from `since` until the run may be claimed."""
        statement = text("SELECT not_before FROM runs WHERE id = :id")
        not_before: datetime = self._looking.execute(statement, {"id": run_id}).scalar_one()
        return (not_before - since).total_seconds()

    def submit(self, call: Call) -> "Future[Any]":
        """Make a call on the other connection, and end its transaction as its caller would."""
        return self._second.submit(self._make, call)

    def is_blocked(self, future: "Future[Any]") -> bool:
        """Wait until the second call has ended, or waits for a lock."""
        blocked = text("SELECT cardinality(pg_blocking_pids(:pid)) > 0")
        while not wait([future], timeout=0.002).done:
            if self._looking.execute(blocked, {"pid": self._pid}).scalar():
                return not future.done()
        return False

    def _make(self, call: Call) -> Any:
        try:
            answer = call.make(self._connection, self.parents)
            (self._connection.rollback if answer in ("refused", "fenced", "gap") else self._connection.commit)()
            return answer
        except BaseException:
            self._connection.rollback()
            raise


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    engine = sync_engine(settings.database_url or "", pool_size=5)
    database = Database(engine)
    yield database
    database.close()
    engine.dispose()


@pytest.mark.timeout(240 * TIMES)
def test_every_order_of_calls_does_what_the_model_says(database: Database) -> None:
    machine = type("OnThisDatabase", (RunMachine,), {"database": database})
    run_state_machine_as_test(machine, settings=examples(15, stateful_step_count=40))

"""A claim takes no GPU whose memory other programs use, on which the check failed, or that was just reserved."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from app.config import Settings
from app.infra.db import is_conflict
from app.runs.state import machine
from tests.rows import add_run, add_worker, waiting_for_locks
from tests.waiting import eventually
from tests.worker.test_devices import install
from worker import devices
from worker.attempts import device_checks, supervisor
from worker.context import WorkerContext


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """GiB of memory in use on each of two GPUs of 80 GiB; a test may change it."""
    used = [0, 0]
    driver = install(monkeypatch, len(used))
    driver.used = used
    devices.list_gpus.cache_clear()
    return used


@pytest.fixture
def context(settings: Settings, engine: Engine, used: list[int]) -> Iterator[WorkerContext]:
    context = WorkerContext(settings)
    context.id = add_worker(engine, devices=2, kind="cuda")
    yield context
    context.engine.dispose()
    context.lease_engine.dispose()
    devices.list_gpus.cache_clear()


def test_a_gpu_full_of_other_programs_takes_no_run_until_it_is_free(
    context: WorkerContext, engine: Engine, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_checks, "UNUSABLE_PAUSE_SECONDS", 600.0)
    for _ in range(2):
        add_run(engine)
    used[:] = [70, 3]
    first = supervisor.claim(context)
    assert first is not None and first.device_indexes == [1]
    assert supervisor.claim(context) is None
    query = text("SELECT trouble FROM devices ORDER BY index")
    with engine.connect() as connection:
        occupied, free = connection.execute(query).scalars()
    assert occupied.startswith("other programs use 70.0 of 80.0 GiB of its memory: end them") and free is None
    used[:] = [3, 70]  # the second is that of the first run by now
    second = supervisor.claim(context)
    assert second is not None and second.device_indexes == [0]
    with engine.connect() as connection:
        assert connection.execute(query).scalars().all() == [None, None]


def test_a_gpu_on_which_the_check_failed_takes_no_run_and_the_others_do(
    context: WorkerContext, engine: Engine, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (context.storage.root / "datasets").mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        add_run(engine)
    seen: list[object] = []

    def wait_checked(_seconds: float) -> bool:
        seen.append("checked" if seen else "not checked yet")
        context.launcher.broken = {"GPU-0abc": "RuntimeError: illegal memory access"}
        return len(seen) == 2

    monkeypatch.setattr(context.launcher, "wait_checked", wait_checked)
    monkeypatch.setattr(supervisor, "supervise_run", lambda _context, run, _sent: seen.append(run.device_indexes))
    supervisor.train_pending_runs(context)
    assert seen == ["not checked yet", "checked", [1]]
    with engine.connect() as connection:
        broken, fine = connection.execute(text("SELECT trouble FROM devices ORDER BY index")).scalars()
        assert connection.scalar(text("SELECT sum(attempt) FROM runs")) == 1, "the broken one has cost no attempt"
    assert broken == (
        "a training step failed on it when the worker started, and is tried again when it restarts: RuntimeError: "
        "illegal memory access"
    )
    assert fine is None


class TestClaimsAtOnce:
    def test_claims_that_waited_for_each_other_are_repeated_without_blaming_the_database(
        self, context: WorkerContext, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        locked = text("SELECT 1 FROM devices WHERE index = :index FOR UPDATE")

        def is_claim_ended() -> bool:
            """PostgreSQL ends the transaction that has waited for a second: this one, if the test was slow."""
            add_run(engine, devices_needed=2)
            with ThreadPoolExecutor(1) as thread:
                try:
                    with engine.begin() as connection:
                        connection.execute(locked, {"index": 1})
                        claimed = thread.submit(supervisor.claim, context)
                        eventually(lambda: waiting_for_locks(engine))
                        connection.execute(locked, {"index": 0})
                except OperationalError as error:
                    assert is_conflict(error)
                    return False
                finally:
                    run = claimed.result(30)
                    assert run is not None
                    with engine.begin() as connection:
                        connection.execute(machine.complete(run.id, run.lease_epoch, None, "done")).one()
            return True

        assert any(is_claim_ended() for _ in range(10))
        assert "unavailable" not in caplog.text


class TestLostCommit:
    """The connection breaks at a commit, and a worker cannot know on which side of it."""

    @pytest.fixture(params=["before", "after"])
    def break_commits(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def break_commits(context: WorkerContext) -> None:
            dialect = context.engine.dialect
            commit = dialect.do_commit

            def break_commit(connection: Any) -> None:
                if request.param == "after":
                    commit(connection)
                connection.dbapi_connection.close()
                raise psycopg.OperationalError("the server closed the connection unexpectedly")

            monkeypatch.setattr(dialect, "do_commit", break_commit)

        return break_commits

    def test_a_run_whose_claim_may_not_be_committed_is_not_trained(
        self, context: WorkerContext, engine: Engine, break_commits: Callable[..., None]
    ) -> None:
        add_run(engine)
        break_commits(context)
        assert supervisor.claim(context) is None

    def test_a_device_stays_known_as_paused_until_it_is_resumed_for_certain(
        self,
        context: WorkerContext,
        used: list[int],
        monkeypatch: pytest.MonkeyPatch,
        break_commits: Callable[..., None],
    ) -> None:
        used[:] = [70, 3]
        device_checks.pause_unusable_devices(context)
        assert context.health.unusable == {0}
        used[:] = [3, 3]
        break_commits(context)
        device_checks.pause_unusable_devices(context)
        assert context.health.unusable == {0}

"""A part of a run on several hosts ends without a process if it cannot start, and says why; its devices are free."""

import threading
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.exc import DataError, OperationalError

from app.config import Settings
from app.runs.events import log as event_log
from app.runs.events.log import NewEvent
from app.runs.state import machine, parts
from app.tables.workers import Device, Worker
from tests.rows import add_run, add_worker, claim, events_of, hold_workers, run_row
from tests.waiting import eventually
from worker import devices
from worker.attempts import device_checks
from worker.attempts import part as part_module
from worker.attempts.outcome import exit_of
from worker.attempts.part import PartSupervisors
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.part_log import PartLog
from worker.lease import EndedPart
from worker.process.process_group import StillAliveError
from worker.process.training_process import Exit
from worker.service import WorkerService
from worker.wire.rank_place import EXIT_RANK_ZERO_UNREACHABLE


@pytest.fixture
def context(settings: Settings, engine: Engine) -> Iterator[WorkerContext]:
    """A worker that trains runs together with others, registered with its device."""
    (settings.storage_root / "datasets").mkdir(parents=True, exist_ok=True)
    context = WorkerContext(settings.model_copy(update={"group_interface": "lo", "slots": 1}))
    registration = WorkerService(context).registration
    registration.note_health(None)
    with engine.begin() as connection:
        registration.register(connection)
        connection.execute(update(Worker).where(Worker.id == context.id).values(backends=["fake"]))
        connection.execute(update(Device).where(Device.worker_id == context.id).values(memory_mb=1000))
    yield context
    context.engine.dispose()
    context.lease_engine.dispose()


@pytest.fixture
def claimed(context: WorkerContext, engine: Engine) -> Any:
    """The claim of a run by another worker, of which this one is to train a part."""
    run_id = add_run(engine, devices_needed=2, hosts_needed=2).id
    lead = add_worker(engine, group_address="10.0.0.1", version=version("anneal"))
    hold_workers(engine, run_id, lead, context.id)
    row = claim(engine, lead)
    assert row.members == [context.id]
    return row


def outcome(engine: Engine, run_id: str) -> Any:
    """How the part of a run has ended; None while it has not."""
    query = "SELECT outcome FROM run_parts WHERE run_id = :id AND ended_at IS NOT NULL"
    with engine.connect() as connection:
        return connection.scalar(text(query), {"id": run_id})


def take(context: WorkerContext, engine: Engine) -> PartSupervisors:
    """Do what a heartbeat does."""
    supervisors = PartSupervisors(context)
    with engine.connect() as connection:
        rows = connection.execute(parts.of_worker(context.id)).all()
    supervisors.start_new_parts(rows)
    supervisors.start_new_parts(rows)
    return supervisors


def is_free(context: WorkerContext, engine: Engine) -> bool:
    with engine.connect() as connection:
        query = "SELECT run_id IS NULL FROM devices WHERE worker_id = :id"
        return bool(connection.scalar(text(query), {"id": context.id}))


def test_without_the_files_of_the_run_it_ends_with_their_path(
    context: WorkerContext, engine: Engine, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "_VISIBLE_SECONDS", 0.2)
    supervisors = take(context, engine)
    with engine.begin() as connection:
        connection.execute(parts.announce(claimed.id, claimed.lease_epoch, "tcp://127.0.0.1:1"))
    eventually(lambda: _has_ended(context, claimed.id, engine), timeout=30, what="the part has ended")
    end = outcome(engine, claimed.id)
    assert "job.json is not on this worker" in end["problem"] and end["rank"] == 1
    assert is_free(context, engine)
    with engine.begin() as connection:
        (part,) = connection.execute(machine.renew(claimed.id, claimed.lease_epoch, 60.0)).one().parts
    assert part["outcome"] == end
    supervisors.wait()


def _has_ended(context: WorkerContext, run_id: str, engine: Engine) -> bool:
    """Have the lease of the part renewed, as a message of the lead does; return True once the part has ended."""
    context.leases.renew_now(run_id)
    return outcome(engine, run_id) is not None


def test_it_ends_when_the_attempt_of_the_lead_has_ended(context: WorkerContext, engine: Engine, claimed: Any) -> None:
    supervisors = take(context, engine)
    with engine.begin() as connection:
        connection.execute(machine.retry(claimed.id, claimed.lease_epoch, "lost", 0.0))
    eventually(lambda: _has_ended(context, claimed.id, engine), timeout=30, what="the part has ended")
    assert is_free(context, engine)
    supervisors.wait()
    assert run_row(engine, claimed.id).status == "pending"


def test_a_worker_that_shuts_down_before_the_start_releases_the_run(
    context: WorkerContext, engine: Engine, claimed: Any
) -> None:
    supervisors = take(context, engine)
    context.draining.set()
    supervisors.wait()
    assert outcome(engine, claimed.id)["is_released"] and is_free(context, engine)
    assert not [thread for thread in threading.enumerate() if thread.name == f"part {claimed.id}"]


def test_a_log_line_that_the_database_does_not_take_costs_no_other(
    context: WorkerContext, engine: Engine, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["a", "b", "c", "d"]
    append = event_log.append_lines

    def refuse(connection: Any, run_id: str, lease_epoch: int, batch: Any) -> None:
        if any('"b"' in str(event.data) for event in batch):
            raise DataError("INSERT", {}, ValueError("a line that cannot be stored"))
        append(connection, run_id, lease_epoch, batch)

    monkeypatch.setattr(event_log, "append_lines", refuse)
    with PartLog(context, ClaimedRun.from_row(claimed)) as sink:
        for line in lines:
            sink.enqueue_item(NewEvent.from_payload("log", 1.0, {"line": line, "stream": "stdout", "level": "info"}))
    stored = [data["line"] for _, kind, _, data in events_of(engine, claimed.id) if kind == "log"]
    assert (stored, sink._dropped) == (["a", "c", "d"], 1)


def test_it_waits_for_a_database_that_is_away_while_it_prepares(
    context: WorkerContext, engine: Engine, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "_VISIBLE_SECONDS", 0.2)
    prepare, preparations = part_module.Part._prepare_job, []

    def away_at_first(part: Any) -> Any:
        preparations.append(part)
        if len(preparations) == 1:
            raise OperationalError("SELECT", {}, psycopg.OperationalError("the connection is closed"))
        return prepare(part)

    monkeypatch.setattr(part_module.Part, "_prepare_job", away_at_first)
    supervisors = take(context, engine)
    with engine.begin() as connection:
        connection.execute(parts.announce(claimed.id, claimed.lease_epoch, "tcp://127.0.0.1:1"))
    eventually(lambda: _has_ended(context, claimed.id, engine), timeout=30, what="the part has ended")
    supervisors.wait()
    assert len(preparations) == 2 and "job.json is not on this worker" in outcome(engine, claimed.id)["problem"]


def test_part_of_which_a_process_does_not_end_keeps_its_devices(
    context: WorkerContext, engine: Engine, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise StillAliveError("a process does not end")

    monkeypatch.setattr(part_module.Part, "prepare", fail)
    supervisors = take(context, engine)
    with engine.begin() as connection:
        connection.execute(parts.announce(claimed.id, claimed.lease_epoch, "tcp://127.0.0.1:1"))
    context.leases.renew_now(claimed.id)
    supervisors.wait()
    assert outcome(engine, claimed.id) is None and not is_free(context, engine)


def test_other_workers_claim_nothing_of_one_that_is_not_checked_or_has_trouble(context: WorkerContext) -> None:
    registration = WorkerService(context).registration
    assert registration.open_address() is None, "it is not checked yet"
    registration.note_health(None)
    assert registration.open_address() == context.group_address is not None
    registration.note_health("the storage is full")
    assert registration.open_address() is None
    registration.note_health(None)
    registration._healthy_at -= 3 * context.settings.renew_seconds
    assert registration.open_address() is None, "the last check is too long ago: the storage may hang"


def test_a_device_that_another_program_took_since_the_claim_ends_it_and_is_paused(
    context: WorkerContext, engine: Engine, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "occupation_reason", lambda _: "other programs use 70.0 of 80.0 GiB of its memory")
    supervisors = take(context, engine)
    with engine.begin() as connection:
        connection.execute(parts.announce(claimed.id, claimed.lease_epoch, "tcp://127.0.0.1:1"))
    eventually(lambda: _has_ended(context, claimed.id, engine), timeout=30, what="the part has ended")
    supervisors.wait()
    assert outcome(engine, claimed.id)["problem"].startswith("device 0 cannot be used: other programs use 70.0")
    with engine.connect() as connection:
        query = "SELECT run_id, paused_until > now() AS is_paused FROM devices WHERE worker_id = :id"
        assert connection.execute(text(query), {"id": context.id}).one() == (None, True)
    monkeypatch.undo()
    device_checks.pause_unusable_devices(context)
    with engine.connect() as connection:
        query = "SELECT paused_until FROM devices WHERE worker_id = :id"
        assert connection.scalar(text(query), {"id": context.id}) is None, "it takes runs again once it is free"


class TestFiles:
    """A part removes nothing while its lead may write, since both write to the same folder."""

    class Network:
        def __init__(self, silent_seconds: float = 0.0) -> None:
            self.silent_seconds = silent_seconds

    @pytest.fixture
    def part(self, context: WorkerContext, engine: Engine, claimed: Any) -> Any:
        with engine.connect() as connection:
            (row,) = connection.execute(parts.of_worker(context.id)).all()
        lease = SimpleNamespace(meeting="tcp://10.0.0.1:4000", fenced=False, expired=False)
        part = part_module.Part(context, row, lease)  # type: ignore[arg-type]
        part._attempt = 1
        return part

    @staticmethod
    def processes(ended: Exit | None, is_done: bool = False) -> Any:
        def nothing() -> tuple[()]:
            return ()

        return SimpleNamespace(
            poll=lambda: ended, kill=nothing, drain=nothing, receive=nothing, wait=lambda _: None, is_done=is_done
        )

    handler: Any = SimpleNamespace(
        results=SimpleNamespace(part_failure=None),
        state=SimpleNamespace(tail=["the last line"]),
        log=SimpleNamespace(close=lambda: None),
        is_over_budget=False,
    )

    def test_after_a_lost_connection_it_waits_for_the_end_of_the_attempt(
        self, part: Any, context: WorkerContext, engine: Engine, claimed: Any
    ) -> None:
        unfinished = context.storage.attempt_dir(claimed.id, 1) / ".output.tmp"
        unfinished.mkdir(parents=True)
        end = part._watch_processes(self.processes(Exit(peer_lost=True)), self.handler, self.Network())
        assert end.peer_lost
        part.store_end(end)
        thread = threading.Thread(target=part.clean_up_after_attempt)
        thread.start()
        thread.join(3 * context.settings.renew_seconds)
        assert unfinished.is_dir() and thread.is_alive(), "the lead writes its output"
        with engine.begin() as connection:
            connection.execute(machine.complete(claimed.id, claimed.lease_epoch, 1, "done"))
        thread.join(30)
        assert not thread.is_alive() and not unfinished.exists()

    def test_it_ends_with_its_processes_and_waits_for_no_export_of_rank_0(self, part: Any) -> None:
        end = part._watch_processes(self.processes(None, is_done=True), self.handler, self.Network())
        assert (end.exit_code, end.problem, end.failure) == (0, None, None) and exit_of(
            EndedPart("wrk_other", 1, 1, end)
        ) is None

    def test_a_host_of_rank_0_that_cannot_be_reached_for_two_thirds_of_a_lease_ends_it(
        self, part: Any, context: WorkerContext
    ) -> None:
        most = context.settings.kill_after_seconds
        end = part._watch_processes(self.processes(None), self.handler, self.Network(most + 1))
        assert end.problem.startswith("the host of rank 0 could not be reached at tcp://10.0.0.1:4000 for")
        assert end.last_lines == ["the last line"]


class TestEnd:
    @pytest.fixture
    def part(self, context: WorkerContext, engine: Engine, claimed: Any) -> Any:
        """A part whose processes have ended, or must."""
        with engine.connect() as connection:
            (row,) = connection.execute(parts.of_worker(context.id)).all()
        return part_module.Part(context, row, SimpleNamespace(meeting="10.0.0.1:4000", fenced=True))  # type: ignore[arg-type]

    handler: Any = SimpleNamespace(
        results=SimpleNamespace(part_failure=None), state=SimpleNamespace(tail=["the last line"])
    )

    def test_of_a_process_that_never_reached_rank_0_says_what_to_check(self, part: Any) -> None:
        end = part._end_from_exit(Exit(code=EXIT_RANK_ZERO_UNREACHABLE, rank=1), self.handler)
        assert end.rank == 1 and "rank 0 could not be reached at 10.0.0.1:4000: check that ANNEAL_GROUP" in end.problem

    def test_of_a_complete_run_lets_the_device_take_runs_again(
        self, part: Any, context: WorkerContext, engine: Engine, claimed: Any
    ) -> None:
        context.health.device_failed(0)
        assert part._end_from_exit(None, self.handler).exit_code == 0 and part._verdicts == []
        with engine.begin() as connection:
            connection.execute(machine.complete(claimed.id, claimed.lease_epoch, None, "done"))
        assert part._end_from_exit(None, self.handler).exit_code == 0 and len(part._verdicts) == 1
        assert not context.health.device_worked(0)

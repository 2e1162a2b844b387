"""What the worker stores comes before what it tells: readers of new events, everybody of the end."""

import errno
import json
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Engine, func, text, update

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.stop import StopRequest
from app.config import Settings
from app.infra.ids import new_id
from app.infra.process.identity import ProcessIdentity
from app.infra.storage import Storage
from app.runs.events import log as event_log
from app.runs.events.log import NewEvent
from app.runs.state import machine
from app.tables import runs
from app.tables.runs import Run
from tests.rows import add_run, add_worker, claim, events_of, run_row
from tests.waiting import eventually
from worker.attempts import attempt as attempt_module
from worker.attempts import device_checks, supervisor
from worker.attempts.attempt import Attempt
from worker.attempts.job_error import JobError
from worker.attempts.outcome import conclude_attempt, ended_here_before, exit_of, is_signal_death, lease_loss_transition
from worker.context import WorkerContext
from worker.devices import Machine
from worker.ingest.attempt_state import StartPoint
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler
from worker.lease import EndedPart, Lease, LeaseLost
from worker.process.process_group import StillAliveError
from worker.process.spawn import LaunchError
from worker.process.training_process import Exit
from worker.wire.rank_place import EXIT_RANK_ZERO_UNREACHABLE

_SLOW = """
CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END $$;
CREATE TRIGGER dawdle BEFORE INSERT ON run_events FOR EACH ROW
    WHEN (NEW.type = 'log' AND NEW.data->>'line' = 'first') EXECUTE FUNCTION dawdle();
"""


def is_storing_the_first_line(engine: Engine) -> bool:
    query = "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    with engine.connect() as connection:
        return bool(connection.scalar(text(query)))


def test_the_last_status_waits_for_the_last_line_of_the_log(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is gone while Postgres still takes its first line; a change of the run and more lines wait behind."""
    with engine.begin() as connection:
        connection.execute(text(_SLOW))
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings.model_copy(update={"lease_seconds": 60.0}))

    def train(attempt: Attempt) -> Any:
        context.storage.attempt_dir(run.id, run.attempt).mkdir(parents=True)
        record_handler = attempt._record_handler
        record_handler.handle_output([("stdout", b"first\n")])
        eventually(lambda: is_storing_the_first_line(engine))
        record = {"type": "phase", "ts": time.time(), "name": "training", "total_steps": 1}
        record_handler.handle_output(
            [("report", json.dumps(record).encode()), ("stdout", b"second\n"), ("stderr", b"last\n")]
        )
        return machine.complete(run.id, run.lease_epoch, None, "training is complete")

    monkeypatch.setattr(Attempt, "train", train)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    reported = [event.data.get("line") or event.data.get("to") or event.type for event in events_of(engine, run.id)]
    assert reported[2:] == ["first", "progress", "running", "second", "last", "completed", "end"]


def attempt_that_cannot_be_prepared(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, problem: Exception, **values: Any
) -> tuple[WorkerContext, Any]:
    """Execute the transition of an attempt whose preparation raises `problem`; return the worker and the run's row."""
    add_run(engine, **values)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)

    def prepare(*_: Any) -> Any:
        raise problem

    monkeypatch.setattr(attempt_module, "prepare_job", prepare)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    return context, run_row(engine, run.id)


@pytest.mark.parametrize("owner", ["worker.lease", "worker.ingest.event_writer"])
def test_a_run_for_which_no_thread_can_be_started_is_released_without_a_loss(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if sys._getframe(1).f_globals["__name__"] == owner:
            raise RuntimeError("can't start new thread")  # what Python raises where the kernel refuses one
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    released = run_row(engine, run.id)
    assert (released.status, released.lost_count) == ("pending", 0)
    assert "ulimit -u" in (context.health.unhealthy_reason() or "")


def test_a_worker_that_waits_for_its_storage_takes_no_run_meanwhile(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = JobError("storage_unavailable", "it refuses this process", is_transient=True, pause_seconds=0.0)
    worker, run = attempt_that_cannot_be_prepared(settings, engine, monkeypatch, away)
    assert "it refuses this process" in (worker.health.unhealthy_reason() or "")
    assert (run.status, run.lost_count) == ("pending", 0)


def test_error_of_a_step_decides_the_code_with_which_a_run_without_restarts_fails(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[Exception, str] = {
        OSError(errno.ENOSPC, "the dataset does not fit on the disk"): "disk_full",
        OSError(errno.EIO, "the dataset cannot be read"): "worker_lost",
        JobError("bad_data", "there are no rows"): "bad_data",
        JobError("bad_data", "the file is not on this worker", is_transient=True): "worker_lost",
        JobError("storage_unavailable", "for hours", is_transient=True): "storage_unavailable",
        LaunchError("there is no memory"): "worker_lost",
        LeaseLost("run_1"): "worker_lost",
        ValueError("a value of a statement"): "internal",
    }
    codes = {}
    for error in errors:
        _, run = attempt_that_cannot_be_prepared(settings, engine, monkeypatch, error, max_restarts=0)
        assert run.status == "failed"
        codes[error] = run.error_code
    assert codes == errors
    assert "ValueError" in run.error_message and "a value of a statement" not in run.error_message


def test_attempt_on_a_device_that_this_worker_does_not_have_fails_and_is_not_repeated(
    settings: Settings, engine: Engine
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)
    context.machine = Machine((), 0)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    row = run_row(engine, run.id)
    assert (row.status, row.error_code) == ("failed", "internal")


def attempt_whose_processes(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, **methods: Any
) -> tuple[WorkerContext, Any]:
    """Run an attempt whose training processes have these methods; return its worker and the row of the run."""
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)
    job = SimpleNamespace(
        path=settings.storage_root / "job.json", secrets={}, remarks=[], start=StartPoint(0, 0.0, None)
    )
    processes = SimpleNamespace(**{"identities": [ProcessIdentity.of_this_process()], "close": lambda: None, **methods})
    monkeypatch.setattr(attempt_module, "prepare_job", lambda *_: job)
    monkeypatch.setattr(attempt_module, "launch_processes", lambda *_: processes)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    return context, run_row(engine, run.id)


def test_error_of_a_step_after_the_processes_have_started_is_an_internal_one_and_closes_them(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(attempt_module, "MemoryWatch", fail)
    _, run = attempt_whose_processes(settings, engine, monkeypatch, close=lambda: closed.append(True))
    assert (run.status, run.error_code, closed) == ("failed", "internal", [True])


def test_run_of_which_a_process_does_not_end_is_tried_again_and_its_device_takes_none_until_it_has(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StillAliveError("processes [7] of session 7 do not die")

    monkeypatch.setattr(Attempt, "monitor", lambda *_: None)
    worker, run = attempt_whose_processes(settings, engine, monkeypatch, close=fail)
    assert run.status == "pending"
    device = worker.machine.devices[0]
    assert f"process {os.getpid()} of an earlier run" in (device_checks.unusable_reason(worker, device) or "")
    monkeypatch.setattr(ProcessIdentity, "exists", False)
    assert device_checks.unusable_reason(worker, device) is None


def test_attempt_that_is_fenced_in_a_step_writes_nothing(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = attempt_that_cannot_be_prepared(settings, engine, monkeypatch, event_log.LeaseFenced("run_1"))
    assert (run.status, run.error_code) == ("initializing", None)


def test_attempt_whose_events_cannot_be_stored_fails_and_leaves_no_run_behind(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)

    def train(attempt: Attempt) -> Any:
        attempt._writer.enqueue_item(NewEvent.from_payload("log", time.time(), {"line": "a line"}))
        return machine.complete(run.id, run.lease_epoch, None, "training is complete")

    def refuse(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Attempt, "train", train)
    monkeypatch.setattr(event_log, "append_events", refuse)
    supervisor.supervise_run(context, run, time.monotonic())
    context.engine.dispose()
    context.lease_engine.dispose()
    row = run_row(engine, run.id)
    assert (row.status, row.error_code) == ("failed", "internal")


def test_readers_are_woken_when_there_is_something_to_read(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings)
    seen: list[int] = []
    monkeypatch.setattr(context.publisher, "wake_streams", lambda run_id: seen.append(len(events_of(engine, run_id))))
    lease: Any = SimpleNamespace(fenced=False, expired=False, run_id=run.id)
    context.storage.attempt_dir(run.id, run.attempt).mkdir(parents=True)
    with EventWriter(context, run, lease) as writer:
        RecordHandler(context, run, writer).handle_output([("stdout", b"a line\n")])
        eventually(lambda: seen, what="a wake-up")
    context.engine.dispose()
    context.lease_engine.dispose()
    assert seen == [3], "a reader that looked at once would have found nothing, and slept on"


@pytest.mark.parametrize(
    ("hub", "reported"),
    [
        ({"repo": "ada/tuned", "url": "https://hub/ada/tuned/commit/1"}, "; pushed to https://hub/ada/tuned/commit/1"),
        ({"repo": "ada/tuned", "error": "it refused"}, ""),
    ],
)
def test_a_completed_run_reports_where_its_output_was_pushed(hub: Any, reported: str, engine: Engine) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine))
    record_handler: Any = SimpleNamespace(result={"outcome": "completed", "output": "output", "hub": hub})
    nothing: Any = None
    with engine.begin() as connection:
        connection.execute(conclude_attempt(nothing, run, nothing, record_handler, Exit(code=0)))
    last_status = [event.data for event in events_of(engine, run.id) if event.type == "status"][-1]
    assert (last_status["to"], last_status["reason"]) == ("completed", f"training is complete{reported}")


@pytest.mark.parametrize(
    ("why", "end_reason"),
    [(None, "finished"), ("early_stopping", "early_stopping"), ("callback", "callback"), ("time_limit", "time_limit"),
     ("stop_at_step", "stop_at_step")],
)  # fmt: skip
def test_a_limit_that_the_user_set_completes_the_run_and_names_itself(
    why: str | None, end_reason: str, engine: Engine
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine))
    outcome = "completed" if why in (None, "early_stopping", "callback") else "stopped"
    record_handler: Any = SimpleNamespace(result={"outcome": outcome, "why": why, "output": "output"})
    nothing: Any = None
    with engine.begin() as connection:
        connection.execute(conclude_attempt(nothing, run, nothing, record_handler, Exit(code=0)))
    row = run_row(engine, run.id)
    assert (row.status, row.end_reason, row.output_attempt, row.error_code) == ("completed", end_reason, 1, None)


@pytest.mark.parametrize(
    ("steps", "ends", "last"),
    [
        ([5, 5], [9, 9], "at step 5, where an earlier attempt ended too"),
        ([0, 0], [11, 11], "at step 0, where an earlier attempt ended too"),
        ([5, 6, 5], [9, 9, 9], "at step 5, where"),
        ([5, 6, 7, 8], [9, 9, 9, 9], "4 times without a new checkpoint"),
        ([5], [None], "exit code 3"),
    ],
)
def test_a_trainer_killed_by_a_signal_is_retried_until_that_recurs_at_one_step(
    steps: list[int], ends: list[int | None], last: str, engine: Engine
) -> None:
    add_run(engine, max_restarts=3)
    worker, nothing = add_worker(engine), cast(Any, None)
    for step, number in zip(steps, ends, strict=True):
        with engine.begin() as connection:
            connection.execute(update(Run).values(not_before=func.now()))
        run = claim(engine, worker)
        handler: Any = SimpleNamespace(result=None, phase="training", step=step)
        end = Exit(signal=number) if number else Exit(code=3)
        report = FailureReport(exit_signal=number, step=step)
        with engine.begin() as connection:
            is_repeated = is_signal_death(handler, end) and ended_here_before(connection, run, step)
            connection.execute(conclude_attempt(nothing, run, nothing, handler, end, is_repeated))
            connection.execute(
                update(runs.Attempt)
                .where(runs.Attempt.attempt == run.attempt)
                .values(report=report.model_dump(mode="json"))
            )
        status = run_row(engine, run.id).status
        assert status == ("failed" if run.attempt == len(steps) else "pending")
    row = run_row(engine, run.id)
    assert row.error_code == "trainer_crashed" and last in row.error_message


@pytest.mark.parametrize(
    ("silence", "says"),
    [(59.0, "the database was unreachable for 59 s"), (1.0, "the training process received no renewal")],
)
def test_a_trainer_that_ended_by_its_timer_is_blamed_on_the_database_only_where_that_was_silent(
    silence: float, says: str, settings: Settings, engine: Engine
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine))
    context: Any = SimpleNamespace(settings=settings.model_copy(update={"lease_seconds": 60.0}))
    lease = Lease(context, run.id, run.lease_epoch, time.monotonic() - silence)
    with engine.begin() as connection:
        connection.execute(lease_loss_transition(run, lease))
    last_status = [event.data for event in events_of(engine, run.id) if event.type == "status"][-1]
    assert last_status["reason"].startswith(says) and last_status["reason"].endswith(
        "continues from its last checkpoint"
    )


def test_half_written_files_of_a_killed_trainer_are_removed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cancelled has no later attempt that would sweep it."""
    storage = Storage(settings)
    run: Any = SimpleNamespace(
        id=new_id("run"),
        task="train",
        members=[],
        lease_epoch=1,
        attempt=1,
        device_indexes=[0],
        backend="fake",
        config={},
        dataset_id="ds",
        eval_dataset_id=None,
    )
    names = (".checkpoint-5.tmp", "base_model", "base_model.1")  # bases that ranks have merged for themselves
    half = [storage.attempt_dir(run.id, 1) / name for name in names]
    whole = storage.checkpoint_dir(run.id, 1, 4)

    class Killed:
        def __init__(self, *_: Any) -> None:
            for folder in half:
                folder.mkdir(parents=True)
            whole.mkdir()

        def run_until_exit(self) -> Any:
            return Exit(signal=9, killed_for="stop")

    processes = SimpleNamespace(identities=[], close=lambda: None)
    device: Any = SimpleNamespace(index=0, kind="cpu", for_job=dict)
    job = SimpleNamespace(
        path=storage.root / "job.json", config={}, secrets={}, remarks=[], start=StartPoint(0, 0.0, None)
    )
    for name, instead in {
        "prepare_job": lambda *_: job, "launch_processes": lambda *_: processes, "Monitor": Killed,
        "MemoryWatch": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(attempt_module, name, instead)
    context: Any = SimpleNamespace(
        machine=Machine((device,), 0), group_address=None, storage=storage, uploader=None, working_copy=None,
        health=SimpleNamespace(record_start=lambda: None), draining=threading.Event(), telemetry=None,
        settings=settings,
    )  # fmt: skip
    lease: Any = SimpleNamespace(stop=StopRequest("discard"), fenced=False)
    writer: Any = SimpleNamespace(
        enqueue_item=lambda _: None,
        retry_during_outage=lambda work: work(),
        wait_past_lease=lambda: None,
        progress=None,
    )
    Attempt(context, run, lease, writer).train()
    assert whole.is_dir() and not any(folder.exists() for folder in half)


class TestEndOfAPart:
    """Which end of a part on another host ends the run, and how it reads."""

    def exit_of(self, devices: int = 1, **end: Any) -> Exit | None:
        return exit_of(EndedPart("wrk_b", 4, devices, PartEnd(rank=4, **end) if end else None))

    def test_a_process_that_only_lost_the_others_or_that_had_finished_is_no_cause(self) -> None:
        assert self.exit_of(exit_code=75, peer_lost=True) is None
        assert self.exit_of(exit_code=0) is None

    def test_end_of_a_remote_process_is_handled_as_that_of_a_local_one(self) -> None:
        assert self.exit_of(exit_signal=9) == Exit(signal=9, rank=4)
        assert self.exit_of(exit_signal=9, out_of_memory=True) == Exit(signal=9, out_of_memory=True, rank=4)
        failure: dict[str, Any] = {"outcome": "failed", "error": {"code": "bad_data", "message": "no rows"}}
        assert self.exit_of(exit_code=1, failure=failure) == Exit(code=1, rank=4)

    def test_a_lost_worker_and_a_part_that_could_not_start_are_tried_again_with_the_reason(
        self, engine: Engine
    ) -> None:
        for end, says in (
            (self.exit_of(2), "worker wrk_b, which trained ranks 4 to 5 of the run, was lost"),
            (
                Exit(code=EXIT_RANK_ZERO_UNREACHABLE, rank=1),
                "its own host, by the address of ANNEAL_GROUP_INTERFACE: check that",
            ),
            (self.exit_of(problem="/data is not on this worker"), "rank 4 of the run, ended its part: /data is not on"),
        ):
            assert end is not None
            add_run(engine)
            run = claim(engine, add_worker(engine))
            nothing: Any = SimpleNamespace(result=None, phase="training", step=3)
            with engine.begin() as connection:
                connection.execute(conclude_attempt(nothing, run, nothing, nothing, end))
            assert run_row(engine, run.id).status == "pending"
            reason = events_of(engine, run.id)[-1].data["reason"]
            assert says in reason

    def test_a_worker_that_is_shutting_down_is_no_loss(self, engine: Engine) -> None:
        add_run(engine)
        run = claim(engine, add_worker(engine))
        lease: Any = SimpleNamespace(stop=None, preempted_for=None, leaving="wrk_b")
        nothing: Any = SimpleNamespace(result={"outcome": "stopped", "why": "drain"})
        with engine.begin() as connection:
            connection.execute(conclude_attempt(nothing, run, lease, nothing, Exit(code=0)))
        row = run_row(engine, run.id)
        assert (row.status, row.lost_count) == ("pending", 0)
        assert (
            "worker wrk_b, which trains a part of the run, is shutting down"
            in events_of(engine, run.id)[-1].data["reason"]
        )


def test_the_failure_of_a_part_is_that_of_the_run_and_its_lines_are_kept(settings: Settings, engine: Engine) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine))
    context = WorkerContext(settings)
    sink: Any = SimpleNamespace(enqueue_item=lambda _: None, progress=None)
    handler = RecordHandler(context, run, sink)
    failure = {"outcome": "failed", "error": {"code": "device_error", "message": "no memory\x00 left"}}
    handler.take_part_end(PartEnd(rank=5, exit_code=1, failure=failure, last_lines=["[rank 5] Traceback"]))
    handler.flush_output()
    context.engine.dispose()
    context.lease_engine.dispose()
    assert handler.state.result is not None and handler.state.failed_rank == 5
    error = handler.state.result["error"]
    assert error is not None and error["code"] == "device_error"
    assert error["message"].startswith("On rank 5: no memory") and "\x00" not in error["message"]
    assert list(handler.state.tail) == ["[rank 5] Traceback"]

"""Pump and writer: what a trainer says is stored once and in order, also when a commit's answer got lost."""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.exc import OperationalError, ProgrammingError

from anneal.contracts.attempt.failure_report import MemoryPoint
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.files.disk_space import DatabaseReserve
from app.infra.storage import Storage
from app.runs.events.log import LeaseFenced, NewEvent
from app.runs.state import machine
from app.tables.actions import RunAction
from app.tables.checkpoints import Checkpoint
from app.tables.runs import AttemptTimings
from tests.rows import add_run, add_worker, claim, events_of, run_row
from worker.attempts.failure_report import build_failure_report
from worker.ingest.attempt_state import StartPoint
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler
from worker.ingest.spool import RunUpdate
from worker.lease import LeaseLost
from worker.process.training_process import Exit
from worker.wire.heartbeat import HEARTBEAT, RESUMED, WAITING


class Lab:
    """A claimed run and its record handler, on real tables; the trainer is what the test says."""

    def __init__(self, settings: Settings, engine: Engine, reserve: DatabaseReserve | None = None) -> None:
        self.engine = engine
        add_run(engine)
        self.run = claim(engine, add_worker(engine))
        # A lease that neither ends nor is lost unless the test says so: what is under test is what is stored.
        self.lease: Any = SimpleNamespace(fenced=False, expired=False, run_id=self.run.id)
        self.draining = threading.Event()
        context: Any = SimpleNamespace(
            engine=engine,
            publisher=SimpleNamespace(wake_streams=lambda _: None),
            storage=Storage(settings),
            settings=settings,
            draining=self.draining,
            uploader=None, database_reserve=reserve,
        )  # fmt: skip
        self.folder = context.storage.attempt_dir(self.run.id, self.run.attempt)
        self.folder.mkdir(parents=True)
        self.writer = EventWriter(context, self.run, self.lease)
        self.record_handler = RecordHandler(context, self.run, self.writer)

    def says(self, type: str, **fields: Any) -> None:
        record = {"type": type, "ts": time.time(), **fields}
        self.record_handler.handle_output([("report", json.dumps(record).encode())])

    def prints(self, text: str) -> None:
        self.record_handler.handle_output([("stdout", text.encode())])

    def events(self) -> list[tuple[str, Any]]:
        events = events_of(self.engine, self.run.id)
        assert [one.seq for one in events] == list(range(1, len(events) + 1))
        return [(one.type, one.data) for one in events]


@pytest.fixture
def lab(settings: Settings) -> Iterator[Lab]:
    engine = sync_engine(settings.database_url or "")
    lab = Lab(settings, engine)
    with lab.writer:
        yield lab
    engine.dispose()


def checkpoint(step: int) -> dict[str, Any]:
    return {
        "name": f"checkpoint-{step}", "step": step, "epoch": 0.5, "kind": "periodic", "bytes": 10,
        "manifest_sha256": "a" * 64, "metrics": {"loss": 1.0},
    }  # fmt: skip


def test_every_line_of_a_flood_and_every_message_is_in_the_complete_log(lab: Lab) -> None:
    lab.prints("".join(f"line {number}\n" for number in range(5000)))
    lab.record_handler.handle_output([("stderr", b"of another rank\n")], rank=3)
    lab.says("message", line="a message")
    lab.record_handler.flush_output()
    lab.writer.drain()
    complete = gzip.decompress((lab.folder / "log.txt.gz").read_bytes()).decode().splitlines()
    texts = [line.split(" ", 3)[-1] for line in complete]
    assert texts == [*(f"line {number}" for number in range(5000)), "[rank 3] of another rank", "a message"]
    (note,) = [data for _, data in lab.events() if "left_out" in data]
    assert note["left_out"] == 5000 - 2000 - 50
    assert f"`anneal runs logs --all {lab.run.id} --attempt 1`" in note["line"]
    stored = [data["line"] for _, data in lab.events() if "line" in data]
    assert {*texts} - {*stored} == {f"line {number}" for number in range(2000, 4950)}


def test_keeps_the_trainers_order_across_lines_records_and_status_changes(lab: Lab) -> None:
    lab.prints("one\n")
    lab.says("phase", name="training", start_step=0, total_steps=10)
    lab.prints("two\n")
    lab.says("metric", step=1, epoch=0.1, loss=2.0, total_steps=10)
    lab.says("phase", name="saving")
    lab.says("checkpoint", **checkpoint(1))
    lab.says("phase", name="training")
    lab.prints("three\n")
    lab.writer.drain()
    reported = [data.get("line") or data.get("to") or kind for kind, data in lab.events()[2:]]
    assert reported == [
        "one", "progress", "running", "two", "metric", "progress", "checkpointing", "checkpoint", "progress",
        "running", "three",
    ]  # fmt: skip
    row = run_row(lab.engine, lab.run.id)
    assert (row.current_step, row.total_steps, row.best_loss, row.checkpoint_step) == (1, 10, 2.0, 1)


def test_the_best_evaluation_is_the_score_of_the_run_and_rolls_back_with_an_attempt(lab: Lab) -> None:
    def score() -> float | None:
        lab.writer.drain()
        best_score: float | None = run_row(lab.engine, lab.run.id).best_score
        return best_score

    lab.record_handler.start_from(StartPoint(4, 0.5, None, 2.0), [], [])
    lab.says("phase", name="training", start_step=4, total_steps=10)
    assert score() == 2.0
    for metrics in ({"eval_loss": 2.5}, {"eval_loss": True}, {"eval_loss": "1"}, {"eval_reward": 9.0}, {}, None):
        lab.says("eval", step=5, metrics=metrics)
    assert score() == 2.0
    lab.says("eval", step=6, epoch=0.5, metrics={"eval_loss": 1.5})
    assert score() == 1.5
    assert [kind for kind, _ in lab.events()].count("eval") == 7


def test_a_higher_reward_is_a_better_score(lab: Lab) -> None:
    lab.run.config["method"] = "rlhf"
    for reward in (0.25, 0.75, 0.5):
        lab.says("eval", step=1, metrics={"eval_reward": reward, "eval_loss": 0.0})
    lab.writer.drain()
    assert run_row(lab.engine, lab.run.id).best_score == -0.75


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_commit_whose_answer_got_lost_is_not_stored_twice(lab: Lab, nth: int) -> None:
    """The nth transaction is committed, but its caller sees the connection fail."""
    commits = 0

    def lose_answer(connection: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == nth:
            connection.connection.driver_connection.commit()
            raise OperationalError("COMMIT", {}, Exception("connection timed out"))

    event.listen(lab.engine, "commit", lose_answer)
    for step in range(1, 4):
        lab.prints(f"line {step}\n")
        lab.says("phase", name="training", start_step=0, total_steps=3)
        lab.says("metric", step=step, epoch=0.1, loss=3.0 - step / 10, total_steps=3)
        lab.says("phase", name="saving")
        lab.says("checkpoint", **checkpoint(step))
        lab.writer.drain()
    event.remove(lab.engine, "commit", lose_answer)
    assert commits > nth
    kinds = [kind for kind, _ in lab.events()]
    assert (kinds.count("log"), kinds.count("metric"), kinds.count("checkpoint")) == (3, 3, 3)
    assert [data["to"] for kind, data in lab.events() if kind == "status"][2:] == [
        "running", "checkpointing", "running", "checkpointing", "running", "checkpointing",
    ]  # fmt: skip


def test_skipped_rows_become_an_event(lab: Lab) -> None:
    skipped = {"data": "training", "count": 2, "total": 9, "reason": "2 of 9 rows were left out.", "examples": [3, 4]}
    lab.says("skipped_rows", **skipped)
    lab.writer.drain()
    assert lab.events()[-1] == ("skipped_rows", skipped)


def test_a_sign_of_life_is_heard_and_stored_nowhere(lab: Lab) -> None:
    lab.prints("before\n")
    lab.record_handler.state.last_output_at = 0.0
    lab.record_handler.handle_output([("report", HEARTBEAT)])
    assert lab.record_handler.state.last_output_at > 0
    lab.prints("after\n")
    lab.writer.drain()
    assert [data["line"] for _, data in lab.events()[2:]] == ["before", "after"]


def test_a_rank_that_waits_for_others_is_known_until_it_goes_on(lab: Lab) -> None:
    lab.record_handler.handle_output([("report", WAITING)], 1)
    lab.record_handler.handle_output([("report", WAITING), ("stderr", b"a warning\n")], 2)
    assert lab.record_handler.state.waiting == {1, 2}
    lab.record_handler.handle_output([("report", RESUMED)], 1)
    assert lab.record_handler.state.waiting == {2}
    lab.writer.drain()
    assert [data["line"] for _, data in lab.events()[2:]] == ["[rank 2] a warning"]


@pytest.mark.parametrize(("outcome", "is_kept"), [("completed", True), ("failed", False)])
def test_how_long_the_end_of_an_extended_run_took_is_kept_for_predictions(
    lab: Lab, outcome: str, is_kept: bool
) -> None:
    lab.says("phase", name="training", start_step=0, total_steps=2)
    lab.says("metric", step=1, epoch=0.5, loss=2.0, total_steps=2)
    lab.says("action", id="act_1", action="extend", step=1, epoch=0.5, status="done", total_steps=3)
    lab.says("metric", step=3, epoch=1.5, loss=1.0)
    lab.says("result", outcome=outcome, step=3)
    lab.writer.drain()
    with lab.engine.connect() as connection:
        timings = connection.execute(select(AttemptTimings.timings)).scalar_one()
    assert (timings["step"], timings["total_steps"]) == (3, 3)
    assert (timings["finishing"] is not None) is is_kept


def test_tokens_of_an_attempt_are_those_of_its_metrics_and_of_no_other_value(lab: Lab) -> None:
    lab.says("phase", name="training", start_step=0)
    rates: list[dict[str, Any]] = [
        {"tokens_per_second": 100.0, "step_seconds": 2.0, "data_seconds": 0.5, "tokens": 9250},
        {"tokens_per_second": "many", "step_seconds": 2, "data_seconds": 1},
        {"tokens_per_second": 1e308, "step_seconds": 1e308, "data_seconds": 0.0},
        {"tokens_per_second": 50.0, "step_seconds": 1.0, "data_seconds": 0.0},
    ]
    for step, extra in enumerate(rates, 1):
        lab.says("metric", step=step, epoch=0.1, loss=2.0, extra=extra)
    lab.says("result", outcome="completed", step=4)
    lab.writer.drain()
    with lab.engine.connect() as connection:
        assert connection.execute(select(AttemptTimings.timings)).scalar_one()["tokens"] == 300.0


def test_what_postgres_refuses_is_reported_and_the_rest_is_stored(lab: Lab) -> None:
    lab.prints("before\n")
    lab.says("metric", step=1, epoch=0.1, loss=float("nan"), note="a\x00b\ud800c")
    lab.prints("after \x00 \x1b[31mred\n")
    lab.writer.drain()
    events = lab.events()[2:]
    assert [kind for kind, _ in events] == ["log", "metric", "log"]
    assert events[1][1]["loss"] is None and "loss" in events[1][1]["non_finite"]


@pytest.mark.parametrize("name", ["../../../datasets/ds_x", "/etc", "checkpoint-2", "checkpoint-1/..", ""])
def test_a_checkpoint_that_is_not_called_as_it_has_to_be_is_none(lab: Lab, name: str) -> None:
    """Its name is that of a folder which is removed one day."""
    lab.says("phase", name="training", start_step=0, total_steps=10)
    lab.says("checkpoint", **{**checkpoint(1), "name": name})
    lab.says("checkpoint", **{**checkpoint(3), "metrics": {"eval_loss": "x", "loss": 2.0}})
    lab.writer.drain()
    checkpoints = [data for kind, data in lab.events() if kind == "checkpoint"]
    assert [data["step"] for data in checkpoints] == [3]
    assert any("must be named checkpoint-1" in data.get("line", "") for _, data in lab.events())
    with lab.engine.connect() as connection:
        assert connection.scalar(select(Checkpoint.metrics)) == {"loss": 2.0, "best_loss": None}


@pytest.mark.parametrize("fields", [{"step": 2**31}, {"step": "7"}, {"step": 1.5}, {"step": 1, "total_steps": "many"}])
def test_a_step_that_is_none_is_reported_and_training_goes_on(lab: Lab, fields: dict[str, Any]) -> None:
    lab.says("phase", name="training", start_step=0, total_steps=10)
    lab.says("metric", epoch=0.1, loss=2.0, **fields)
    lab.says("metric", step=4, epoch=0.2, loss=1.0)
    lab.writer.drain()
    assert [data["step"] for kind, data in lab.events() if kind == "metric"] == [4]
    assert any("whole number" in data.get("line", "") for _, data in lab.events())
    assert run_row(lab.engine, lab.run.id).current_step == 4


def test_what_was_stored_of_a_refused_batch_is_not_stored_again_after_an_outage(lab: Lab) -> None:
    """The batch is halved because of one event, and the database goes away between the halves."""
    transactions = 0

    def fail_once(connection: Any) -> None:
        nonlocal transactions
        transactions += 1
        if transactions == 3:  # the batch, its first half, and now the second
            raise OperationalError("BEGIN", {}, Exception("the server closed the connection"))

    batch = [NewEvent("log", datetime.now(UTC), json.dumps({"line": f"line {number}"})) for number in range(8)]
    batch[6] = NewEvent("log", datetime.now(UTC), "{no JSON")
    lab.writer.drain()
    event.listen(lab.engine, "begin", fail_once)
    with lab.writer._changed:  # so that all of them are one batch
        for event_of_batch in batch:
            lab.writer._waiting.enqueue_item(event_of_batch)
        lab.writer._changed.notify_all()
    lab.writer.drain()
    event.remove(lab.engine, "begin", fail_once)
    reported = [data["line"] for kind, data in lab.events() if kind == "log"]
    assert reported[:6] == [f"line {number}" for number in range(6)] and reported[7] == "line 7" and len(reported) == 8
    assert reported[6] == "an event of type log could not be stored; an operator finds the cause in the worker's log"


def test_one_event_that_is_refused_costs_only_itself(lab: Lab) -> None:
    for step in range(1, 20):
        data = '{"broken": ' if step == 7 else "{}"
        lab.writer.enqueue_item(NewEvent("eval", datetime.now(UTC), data))
    lab.writer.drain()
    kinds = [kind for kind, _ in lab.events()[2:]]
    assert kinds == ["eval"] * 6 + ["log"] + ["eval"] * 12


def test_a_checkpoint_that_the_database_refuses_is_reported_and_training_goes_on(lab: Lab) -> None:
    lab.says("checkpoint", **{**checkpoint(1), "kind": "unheard of"})
    lab.says("eval", step=1, epoch=0.1, metrics={})
    lab.writer.drain()
    (log, refused), (kind, _) = lab.events()[2:]
    assert (log, kind) == ("log", "eval")
    assert "of type checkpoint could not be stored" in refused["line"] and "kind_known" not in refused["line"]


@pytest.mark.parametrize("record", [
    b"{", b"[]", b'{"type": "metric"}', b'{"type": "eval", "ts": 1e300}', b"\xff",
    b'{"type": "eval", "step": 1, "metrics": [1]}', b'{"type": "eval", "step": 1, "metrics": "x"}',
])  # fmt: skip
def test_a_record_that_makes_no_sense_is_a_line_in_the_log(lab: Lab, record: bytes) -> None:
    lab.record_handler.handle_output([("report", record)])
    lab.writer.drain()
    assert [kind for kind, _ in lab.events()[2:]] == ["log"]


def test_a_record_beyond_the_limit_of_its_size_is_a_line_in_the_log(lab: Lab) -> None:
    lab.says("sample", step=1, prompt="x" * 60_000, completion="y" * 60_000)
    lab.says("sample", step=1, prompt="x" * 70_000, completion="y" * 70_000)
    grown = b'{"type": "progress", "phase": "a", "done": [' + b"1e15," * 9000 + b'1e15], "more": [' + b"1e15," * 9000
    lab.record_handler.handle_output([("report", grown + b"1e15]}")])
    lab.writer.drain()
    (kind, _), (_, too_long), (_, too_large) = lab.events()[2:]
    assert kind == "sample" and "at most 131,072" in too_long["line"] and "the limit of 131,072" in too_large["line"]


def test_a_record_cannot_speak_for_another_run(lab: Lab) -> None:
    lab.says("progress", phase="loading", done=1, run_id="run_other", seq=9, cursor=9)
    lab.writer.drain()
    assert lab.events()[2:] == [("progress", {"phase": "loading", "done": 1})]


def test_names_of_non_finite_values_are_bounded(lab: Lab) -> None:
    values = ",".join(["NaN"] * 9000)
    lab.record_handler.handle_output([("report", f'{{"type": "progress", "{"x" * 60_000}": [{values}]}}'.encode())])
    lab.writer.drain()
    ((_, data),) = lab.events()[2:]
    assert len(data["non_finite"]) == 100 and max(map(len, data["non_finite"])) == 200


def test_a_process_that_reports_too_much_has_to_wait_and_its_log_says_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    handler, record = lab.record_handler, b'{"type": "unknown"' + b" " * 120_000 + b"}"
    while not handler.is_over_budget:
        assert not any("report less often" in line for line in handler.state.tail)
        handler.handle_output([("report", record)])
    handler.handle_output([("report", record)])
    assert len([line for line in handler.state.tail if "report less often" in line]) == 1
    now[0] += 0.3
    assert not handler.is_over_budget


def test_an_attempt_has_a_limit_of_curves(lab: Lab) -> None:
    values = {f"value.{number}": 1.0 for number in range(700)}
    for step in (1, 2):
        lab.says("metric", step=step, extra=values)
    lab.says("eval", step=2, metrics={"eval_loss": 2.0, "x" * 201: 1.0})
    lab.says("metric", step=3, extra={f"step.{number}": 1.0 for number in range(700)} | values)
    lab.writer.drain()
    first, again, log, (_, measured), (_, last) = lab.events()[2:]
    assert first[1]["extra"] == again[1]["extra"] == values
    assert measured["metrics"] == {"eval_loss": 2.0}
    assert log[0] == "log" and "more than 1,000 names" in log[1]["line"]
    assert len(last["extra"]) == 1000 - 1 and last["extra"].keys() >= values.keys()


@pytest.mark.parametrize(
    ("record", "most"),
    [
        (b'{"type": "progress", "phase": "loading", "done": 1}', 200),
        (b"{", 200),
        (b'{"type": "metric", "step": 1}', 6000),
    ],
    ids=["the stream of all runs", "the log with errors", "the database with rows"],
)
def test_a_process_cannot_flood(lab: Lab, monkeypatch: pytest.MonkeyPatch, record: bytes, most: int) -> None:
    monkeypatch.setattr(lab.writer, "enqueue_item", lambda _: None)
    now = time.monotonic()
    # The budget grows with time, of which a busy machine takes more.
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lab.record_handler._budget.spend_bytes(15 * 2**20, now)
    count = 0
    while not lab.record_handler.is_over_budget:
        lab.record_handler.handle_output([("report", record)] * 10)
        count += 10
    assert most / 2 <= count <= most


def test_the_best_losses_take_bounded_memory(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.ingest.recorders.metrics._MAX_BESTS", 100)
    for step in range(1, 1001):
        lab.says("metric", step=step, loss=float(-step))
    assert len(lab.record_handler.metrics._bests) <= 101
    lab.says("checkpoint", **checkpoint(1000))
    lab.writer.drain()
    with lab.engine.connect() as connection:
        assert connection.scalar(select(Checkpoint.metrics)) == {"loss": 1.0, "best_loss": -1000.0}


def test_an_invalid_detail_of_a_result_does_not_cost_the_run_its_outcome(lab: Lab) -> None:
    lab.says("result", outcome="completed", step="last", hub="nonsense", output="output")
    lab.says("result", outcome="perhaps")
    lab.writer.drain()
    assert lab.record_handler.state.result is not None and lab.record_handler.state.result["outcome"] == "completed"
    assert (
        not {"hub", "step"} & set(lab.record_handler.state.result)
        and lab.record_handler.state.result.get("output") == "output"
    )
    ignored, invalid = (data["line"] for _, data in lab.events()[2:])
    assert "hub, step" in ignored and "`outcome`" in invalid


@pytest.mark.parametrize(
    ("type", "fields"),
    [
        ("phase", {}),
        ("phase", {"name": 1}),
        ("phase", {"name": "x" * 1000}),
        ("message", {"line": ["a"]}),
        ("config", {"effective": 1, "replaced": [], "facts": {}}),
        ("checkpoint", {**checkpoint(1), "bytes": "many"}),
        ("checkpoint", {**checkpoint(1), "bytes": -1}),
        ("checkpoint", {**checkpoint(1), "step": True}),
        ("action", {"id": "act_1", "action": "sample", "step": 1, "status": "perhaps"}),
        ("action", {"id": "act_1", "action": "sample", "step": -1, "status": "done"}),
    ],
)
def test_a_record_with_a_field_of_another_type_is_a_line_in_the_log(
    lab: Lab, type: str, fields: dict[str, Any]
) -> None:
    lab.says(type, **fields)
    lab.writer.drain()
    assert [kind for kind, _ in lab.events()[2:]] == ["log"]


def test_no_message_of_a_trainer_controls_a_terminal(lab: Lab) -> None:
    lab.says("message", line="\x1b]0;owned\x07\x1b[2Jfirst\rline\nsecond\u202e \x9b2J\ttab")
    lab.writer.drain()
    assert lab.events()[-1][1]["line"] == "first␍line\nsecond\\u202e \\x9b2J\ttab"
    lab.says("result", outcome="failed", error={"code": "bad\x07", "message": "\x1b[31mred\nand\rblue"})
    assert lab.record_handler.state.result["error"] == {"code": "internal", "message": "red\nand␍blue"}


def test_nothing_that_a_trainer_reports_makes_the_report_of_its_attempt_large_or_costly(lab: Lab) -> None:
    """Its phase is in each point of the memory timeline; repairs and post-mortems look for divisors of its batch."""
    junk, config = "x" * 30_000, TrainingConfig.model_validate({"base_model": "tiny"}).model_dump(mode="json")
    lab.says("phase", name=junk)
    lab.says("config", effective={**config, "batch_size": 2**61 - 1}, replaced=[], facts={})
    details = {"summary": junk, "in_evaluation": False, "singled_out": []}
    lab.says("result", outcome="failed", error={"code": junk, "message": junk, "details": details})
    lab.writer.drain()
    (_, phase), (_, config_line), (kind, _) = lab.events()[2:]
    assert kind == "config" and "invalid record" in phase["line"] and "`batch_size`" in config_line["line"]
    handler = lab.record_handler
    assert handler.state.phase == "loading"
    assert handler.state.effective is None and run_row(lab.engine, lab.run.id).effective_config is None
    point = MemoryPoint(seconds=1.0, phase=handler.state.phase, host_mb=1, host_free_mb=1)
    watch: Any = SimpleNamespace(peaks={}, timeline=[point] * 260)
    report = build_failure_report(handler.state, watch, Exit(code=1), None)
    assert report.error is not None and report.error["code"] == "internal"
    assert len(report.error["message"]) == len(report.error["details"]["summary"]) == 8000
    assert len(report.model_dump_json()) < 64 * 1024
    lab.says("config", effective=config, replaced=[], facts={})
    lab.writer.drain()
    assert handler.state.effective == run_row(lab.engine, lab.run.id).effective_config == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flops_sequence_length", "64"),
        ("flops_sequence_length", 0),
        ("flops_per_token_hardware", "x"),
        ("flops_per_token_hardware", 1e300),
        ("device", {"kind": "cpu"}),
        ("whole_run_steps", 2**40),
        ("kernels", "fused"),
        ("step_plan", {"batch_size": 0}),
        ("fidelity_reasons", 7),
    ],
)
def test_facts_of_another_type_or_range_are_left_out_with_a_line_in_the_log(lab: Lab, name: str, value: Any) -> None:
    config = TrainingConfig.model_validate({"base_model": "tiny"}).model_dump(mode="json")
    others = {"device_memory_mb": 80_000, "total_steps": 4, "of a plugin": [1, 2]}
    lab.says("config", effective=config, replaced=[], facts={**others, name: value})
    lab.writer.drain()
    (_, line), (_, event) = lab.events()[2:]
    assert line["level"] == "warning" and f"ignored: {name}" in line["line"]
    assert event["facts"] == others and event["effective"] == config


def test_an_error_that_trying_again_does_not_cure_is_raised_at_once(lab: Lab) -> None:
    def forbidden(_: Any) -> None:
        raise ProgrammingError("SELECT", {}, Exception("permission denied"))

    lab.writer.enqueue_item(RunUpdate(forbidden))
    with pytest.raises(ProgrammingError):
        lab.writer.drain()
    with pytest.raises(ProgrammingError):
        lab.writer.retry_during_outage(lambda: forbidden(None))


def test_a_fenced_record_handler_writes_nothing(lab: Lab) -> None:
    with lab.engine.begin() as connection:
        connection.execute(machine.release(lab.run.id, lab.run.lease_epoch, "drain"))
    before = lab.events()
    lab.prints("too late\n")
    with pytest.raises(LeaseFenced):
        lab.writer.drain()
    assert lab.events() == before


def test_gives_up_only_when_the_lease_is_over(lab: Lab) -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        lab.lease.expired = calls == 3
        raise OperationalError("SELECT", {}, Exception("server closed the connection"))

    with pytest.raises(LeaseLost):
        lab.writer.retry_during_outage(fail)
    assert calls == 3


def test_keeps_the_newest_checkpoints_and_marks_the_others(lab: Lab) -> None:
    lab.run.config["save_total_limit"] = 2
    for step in (1, 2, 3, 4):
        lab.says("checkpoint", **checkpoint(step))
    lab.writer.drain()
    with lab.engine.connect() as connection:
        from sqlalchemy import text

        rows = connection.execute(text("SELECT step, deleted_at IS NULL FROM checkpoints ORDER BY step")).all()
    assert [tuple(row) for row in rows] == [(1, False), (2, False), (3, True), (4, True)]


def test_keeps_the_checkpoint_with_the_lowest_evaluation_loss_and_no_other_best(lab: Lab) -> None:
    lab.run.config["save_total_limit"] = 1
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        record = checkpoint(step)
        lab.says("checkpoint", **{**record, "kind": "best", "metrics": {"loss": 1.0, "eval_loss": loss}})
        lab.writer.drain()
    with lab.engine.connect() as connection:
        from sqlalchemy import text

        rows = connection.execute(text("SELECT step FROM checkpoints WHERE deleted_at IS NULL ORDER BY step")).all()
    assert [row.step for row in rows] == [2, 4]


def test_a_checkpoint_that_is_reported_behind_later_steps_has_the_best_loss_of_its_own(lab: Lab) -> None:
    """It was copied at its step and written while training went on; the run does not fall back for it."""
    lab.says("phase", name="training", start_step=0, total_steps=10)
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5)):
        lab.says("metric", step=step, epoch=0.1 * step, loss=loss)
    lab.says("checkpoint", **checkpoint(2))
    lab.says("metric", step=5, epoch=0.5, loss=1.0)
    lab.says("checkpoint", **checkpoint(4))
    lab.writer.drain()
    with lab.engine.connect() as connection:
        rows = connection.execute(select(Checkpoint.step, Checkpoint.metrics).order_by(Checkpoint.step)).all()
    assert [(row.step, row.metrics["best_loss"]) for row in rows] == [(2, 2.5), (4, 1.5)]
    row = run_row(lab.engine, lab.run.id)
    assert (row.current_step, row.best_loss, row.checkpoint_step) == (5, 1.0, 4)


class TestAnActionThatIsDoneOnceMore:
    """By an attempt that goes on from an earlier step."""

    @pytest.mark.parametrize("again", ["failed", "refused", "done"])
    def test_is_reported_and_keeps_its_result_where_it_does_not_work_any_more(self, lab: Lab, again: str) -> None:
        row = {"id": "act_1", "run_id": lab.run.id, "action": "sample"}
        with lab.engine.begin() as connection:
            connection.execute(RunAction.__table__.insert().values(row))  # type: ignore[attr-defined]
        lab.says("action", id="act_1", action="sample", step=1, status="done", result={"samples": ["first"]})
        result = {"samples": ["again"]} if again == "done" else None
        lab.says("action", id="act_1", action="sample", step=1, status=again, result=result, message="so it was")
        lab.writer.drain()
        with lab.engine.connect() as connection:
            action = connection.execute(select(RunAction.status, RunAction.result)).one()
        assert action.status == "done"
        assert action.result == {"samples": ["again" if again == "done" else "first"]}
        reported = [data["status"] for kind, data in lab.events() if kind == "action"]
        assert reported == ["done", again]


class TestOtherRanks:
    def test_their_lines_are_labeled_and_of_their_records_only_a_failure_counts(self, lab: Lab) -> None:
        lab.prints("of rank 0\n")
        metric = {"type": "metric", "ts": time.time(), "step": 1, "loss": 2.0}
        error = {"code": "out_of_memory", "message": "no memory"}
        failed = {"type": "result", "ts": time.time(), "outcome": "failed", "error": error}
        for source, data in (("stdout", b"of rank 1\n"), ("report", json.dumps(failed).encode())):
            lab.record_handler.handle_output([(source, data)], 1)  # type: ignore[list-item]
        lab.record_handler.handle_output([("report", json.dumps(metric).encode())], 1)
        assert lab.record_handler.state.result is None, "rank 0 may have another one to report"
        lab.record_handler.flush_output()
        lab.writer.drain()
        lines = [data["line"] for kind, data in lab.events() if kind == "log"]
        assert lines[:2] == ["of rank 0", "[rank 1] of rank 1"] and "unknown type 'metric'" in lines[2]
        error["message"] = "On rank 1: no memory"
        assert lab.record_handler.state.result == {"type": "result", "outcome": "failed", "error": error}
        assert lab.record_handler.state.failed_rank == 1

    def test_a_failure_that_another_rank_reports_is_that_of_the_rank_on_which_it_happened(self, lab: Lab) -> None:
        """The device of that rank is paused, not the one of the rank that reports it."""
        error = {"code": "device_error", "message": "On rank 3: the GPU failed"}
        failed = {"type": "result", "outcome": "failed", "error": error, "rank": 3}
        lab.record_handler.handle_output([("report", json.dumps(failed).encode())], 1)
        lab.record_handler.flush_output()
        assert (lab.record_handler.state.failed_rank, (lab.record_handler.state.result or {})["error"]) == (3, error)
        lab.says("result", outcome="failed", error=error, rank=2)
        assert lab.record_handler.state.failed_rank == 2

    def test_their_output_is_a_sign_of_life_only_until_training_starts(self, lab: Lab) -> None:
        """Before, they may work for long while rank 0 waits; in training they may go on while rank 0 hangs."""
        handler = lab.record_handler
        handler.state.last_output_at = 0.0
        handler.handle_output([("stdout", b"loading\n")], 1)
        assert handler.state.last_output_at > 0
        handler.state.training_started, handler.state.last_output_at = True, 0.0
        handler.handle_output([("stdout", b"loading\n")], 1)
        assert handler.state.last_output_at == 0.0

    def test_the_result_of_rank_0_comes_first(self, lab: Lab) -> None:
        failed = {"type": "result", "outcome": "failed", "error": {"code": "internal", "message": "it broke"}}
        lab.record_handler.handle_output([("report", json.dumps(failed).encode())], 1)
        lab.says("result", outcome="completed")
        lab.record_handler.flush_output()
        assert (lab.record_handler.state.result or {})["outcome"] == "completed"

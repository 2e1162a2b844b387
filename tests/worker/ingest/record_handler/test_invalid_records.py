"""Records that are invalid, too large or too many cost only themselves."""

import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError

from anneal.contracts.attempt.failure_report import MemoryPoint
from anneal.contracts.training_config.fields import TrainingConfig
from app.runs.events.log import NewEvent
from app.tables.checkpoints import Checkpoint
from tests.rows import run_row
from tests.worker.ingest.record_handler.lab import Lab, checkpoint
from worker.attempts.failure_report import build_failure_report
from worker.process.training_process import Exit


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


def test_an_invalid_record_of_a_serving_run_is_reported_without_the_answer_in_it(lab: Lab) -> None:
    def refuse(pieces: Any) -> None:
        raise ValueError(f"invalid: {pieces}")

    lab.record_handler._on_answers = refuse
    lab.says("answers", pieces=[{"question_id": "1", "text": "the answer"}])
    lab.record_handler.handle_output([("report", b'{"type": "answers", "pieces": [{"text": "the answer')])
    lab.writer.drain()
    lines = [data["line"] for kind, data in lab.events() if kind == "log"]
    assert len([line for line in lines if "invalid record" in line]) == 2
    assert "the answer" not in str(lines)

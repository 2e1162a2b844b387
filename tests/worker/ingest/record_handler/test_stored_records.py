"""Records of a trainer are stored once and in order, also when the answer of a commit got lost."""

import gzip
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError, ProgrammingError

from app.runs.events.log import LeaseFenced
from app.runs.state import machine
from app.tables.actions import RunAction
from app.tables.runs import AttemptTimings
from tests.rows import run_row
from tests.worker.ingest.record_handler.lab import Lab, checkpoint
from worker.ingest.attempt_state import StartPoint
from worker.ingest.spool import RunUpdate
from worker.lease import LeaseLost
from worker.wire.heartbeat import HEARTBEAT, RESUMED, WAITING


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
        {"tokens_per_second": 1e308, "step_seconds": 1.0, "data_seconds": 0.0},
        {"tokens_per_second": 50.0, "step_seconds": 1.0, "data_seconds": 0.0},
    ]
    for step, extra in enumerate(rates, 1):
        lab.says("metric", step=step, epoch=0.1, loss=2.0, extra=extra)
    lab.says("result", outcome="completed", step=5)
    lab.writer.drain()
    with lab.engine.connect() as connection:
        assert connection.execute(select(AttemptTimings.timings)).scalar_one()["tokens"] == 300.0


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

"""What is predicted of real runs, from the queue to their end: a service with one slot, on the fake trainer."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.stack import Stack
from tests.waiting import eventually

OPTIONS: dict[str, Any] = {"steps": 60, "step_seconds": 0.08, "step_jitter": 0.3, "log_lines_per_step": 0}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, slots=1)
    yield stack
    stack.close()


def moment(reported: dict[str, Any], name: str) -> float:
    return datetime.fromisoformat(reported[name]).timestamp()


def all_reported(stack: Stack, *run_ids: str) -> dict[str, Any] | None:
    """The list, by id, once it has a prediction of each: one made just now may lack it for a second."""
    listed = {run["id"]: run for run in stack.client.get("/v1/runs").json()["data"]}
    return listed if all(listed[id]["prediction"] for id in run_ids) else None


def test_runs_say_when_they_start_and_finish_from_the_queue_to_their_end(stack: Stack) -> None:
    def create() -> str:
        return stack.create(OPTIONS, {"logging_steps": 2, "save_steps": 1000})

    first = create()
    reported = eventually(lambda: stack.run(first)["prediction"])
    assert (reported["start_at"], reported["finish_at"]) == (None, None)
    assert reported["basis"].startswith("No worker of backend `fake` is online")

    stack.add_worker()
    stack.until(first, "running")
    # Nothing has trained here before: its own speed is all there is to go by.
    shown = eventually(lambda: run if (run := stack.run(first))["current_step"] >= 24 and run["prediction"] else None)
    created_at = datetime.now(UTC).timestamp()
    reported = shown["prediction"]
    assert reported["confidence"] == "medium" and "based on its own speed" in reported["basis"], reported
    ended = stack.until(first, "completed")
    predicted, took = moment(reported, "finish_at") - created_at, moment(ended, "finished_at") - created_at
    assert predicted == pytest.approx(took, rel=0.5), (predicted, took)
    assert ended["prediction"] is None
    with stack.engine.connect() as connection:
        (timings,) = connection.execute(text("SELECT timings FROM run_timings")).scalars()
    assert (timings["step"], timings["total_steps"]) == (60, 60) and timings["finishing"] is not None
    assert timings["training"] / 60 == pytest.approx(0.08, rel=0.5)

    second, third, fourth = create(), create(), create()
    stack.until(second, "running")
    listed = eventually(lambda: all_reported(stack, second, third, fourth))
    started, next, last = (listed[id]["prediction"] for id in (second, third, fourth))
    assert listed[first]["prediction"] is None
    assert "1 earlier run with this configuration" in started["basis"], started
    assert moment(started, "finish_at") == pytest.approx(moment(next, "start_at"), abs=0.01)
    assert moment(next, "finish_at") == pytest.approx(moment(last, "start_at"), abs=0.01)
    assert moment(next, "finish_at") - moment(next, "start_at") == pytest.approx(60 * 0.08, rel=0.5)
    assert next["basis"].startswith("It is next;") and last["basis"].startswith("1 run is before it;")
    # Whoever is more urgent goes before them.
    urgent = stack.create(OPTIONS, priority=5)
    assert eventually(lambda: stack.run(urgent)["prediction"])["basis"].startswith("It is next;")
    assert stack.stop(second).status_code == 202
    assert eventually(lambda: stack.run(second)["prediction"] is None)

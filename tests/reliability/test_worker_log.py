"""Every line that concerns a run, whichever thread of the worker writes it, says which run and which attempt."""

import json
from typing import Any

from sqlalchemy import text

from tests.stack import Stack
from tests.waiting import eventually


def test_lines_of_supervisor_and_lease_carry_run_and_attempt(stack: Stack) -> None:
    run_id = stack.create({"steps": 10, "step_seconds": 30.0})
    worker = stack.add_worker()
    stack.until(run_id, "running")
    with stack.engine.begin() as connection:
        # As a reaper would that called it lost. The trainer says nothing, so the lease is the first to hear of it.
        connection.execute(text("UPDATE runs SET lease_epoch = lease_epoch + 1 WHERE id = :id"), {"id": run_id})

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in worker.log.read_text().splitlines() if line.startswith("{")]

    def fenced() -> list[dict[str, Any]]:
        return [
            line for line in lines() if line["logger"] == "worker.attempts.supervisor" and "fenced" in line["event"]
        ]

    eventually(fenced, timeout=60)
    concern = [line for line in lines() if run_id in line["event"]]
    assert {"worker.lease", "worker.attempts.supervisor"} <= {line["logger"] for line in concern}
    assert {(line["run_id"], line["attempt"]) for line in concern} == {(run_id, 1)}
    others = [line for line in lines() if run_id not in line["event"]]
    assert any(line["logger"] == "worker.service" for line in others)
    assert not [line for line in others if line["logger"] == "worker.service" and "run_id" in line]

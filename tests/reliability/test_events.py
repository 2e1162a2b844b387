"""A real run whose events have every type: each payload has exactly the fields of its model."""

from anneal.contracts.events import EVENT_TYPES, EVENTS
from tests.stack import Stack

NOT_OF_THE_FAKE_TRAINER = {
    "skipped_rows": "it reads no data",
    "distribution": "it has no weights",
    "export": "this run fails",
    "device": "its machine has no GPU",
    "pending": "it has one only if the worker takes longer than five seconds to start",
}
"""Types that this run does not have, with the reason; other tests see them."""


def test_every_type_is_written_with_the_fields_of_its_model(stack: Stack) -> None:
    """The run evaluates, saves, executes actions, repairs a non-finite step and then fails."""
    run_id = stack.create(
        {"steps": 20, "step_seconds": 0.0, "non_finite_at_step": 7, "fail_at_step": 12, "fail_code": "bad_data"},
        {"on_non_finite": "rewind", "save_steps": 5, "logging_steps": 1, "eval_split": 0.2, "eval_steps": 5},
    )
    for action in ({"action": "sample", "prompts": ["why"]}, {"action": "checkpoint"}):
        assert stack.client.post(f"/v1/runs/{run_id}/actions", json=action).status_code == 202
    stack.add_worker()
    assert stack.until(run_id, "completed", "failed")["error_code"] == "bad_data"
    events = stack.events(run_id)
    assert {event["type"] for event in events} - {"pending"} == {*EVENT_TYPES} - {*NOT_OF_THE_FAKE_TRAINER}
    assert [event for event in events if EVENTS[event["type"]].model_validate(event).model_extra] == []
    assert [event["non_finite"] for event in events if event["type"] == "metric" and "non_finite" in event] == [
        ["loss", "grad_norm"]
    ]

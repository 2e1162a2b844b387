"""A real run that is asked for one thing after another while it trains, and what shows of each at its step."""

from typing import Any

from tests.e2e.conftest import TrainingStack
from tests.waiting import eventually


def ask(stack: TrainingStack, run_id: str, action: str, **parameters: Any) -> str:
    """The path of the action."""
    path = f"/v1/runs/{run_id}/actions"
    answer = stack.client.post(path, json={"action": action, **parameters})
    assert answer.status_code == 202, answer.text
    return f"{path}/{answer.json()['id']}"


def done(stack: TrainingStack, path: str) -> dict[str, Any]:
    """The action, once the run has answered it."""

    def look() -> dict[str, Any] | None:
        shown: dict[str, Any] = stack.client.get(path).json()
        return shown if shown["status"] != "waiting" else None

    answered = eventually(look, timeout=60, what=f"{path} is done")
    assert answered["status"] == "done", answered
    return answered


def test_each_action_shows_at_the_step_named_in_the_order_of_the_requests(stack: TrainingStack) -> None:
    run_id = stack.train(max_steps=50_000, save_steps=50_000, logging_steps=1, eval_split=0.1, eval_steps=50_000)
    # Asked for before it trains, all at once.
    paths = [
        ask(stack, run_id, "sample", prompts=["what is row 3", "say"], max_new_tokens=4, temperature=0.0),
        ask(stack, run_id, "evaluate"),
        ask(stack, run_id, "checkpoint", pin=True),
        ask(stack, run_id, "set_learning_rate", learning_rate=1e-6),
        ask(stack, run_id, "extend", max_steps=60_000),
    ]
    sampled, evaluated, saved, slowed, extended = [done(stack, path) for path in paths]
    assert sampled["step"] <= evaluated["step"] <= saved["step"] < slowed["step"] <= extended["step"]
    stack.until_step(run_id, extended["step"] + 2)
    reported = stack.client.post(f"/v1/runs/{run_id}/stop", json={"mode": "epoch_end"}).json()
    assert reported["status"] in ("running", "checkpointing") and 0 < reported["stop"]["save_seconds"] < 60
    shown = stack.until(run_id, "cancelled", timeout=60)

    events = stack.events(run_id)
    order = [(event["action_id"], event["step"]) for event in events if event["type"] == "action"]
    # A checkpoint is done once it is on disk, perhaps after the next step.
    others = [event for event in order if event[0] != saved["id"]]
    assert others == [(one["id"], one["step"]) for one in (sampled, evaluated, slowed, extended)]
    assert (saved["id"], saved["step"]) in order
    texts = [event["completion"] for event in events if event["type"] == "sample" and event["step"] == sampled["step"]]
    assert texts == [one["completion"] for one in sampled["result"]["samples"]] and all(texts)
    (evaluation,) = [event for event in events if event["type"] == "eval"]
    assert (evaluation["step"], evaluation["metrics"]) == (evaluated["step"], evaluated["result"]["metrics"])
    rates = {event["step"]: event["learning_rate"] for event in events if event["type"] == "metric"}
    assert rates[slowed["step"] + 1] <= 1e-6 < rates[slowed["step"]]
    checkpoints = {one["id"]: one for one in stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]}
    pinned = checkpoints[saved["result"]["checkpoint_id"]]
    assert (pinned["step"], pinned["pinned"], pinned["kind"]) == (saved["step"], True, "periodic")
    assert (shown["total_steps"], shown["effective_config"]["max_steps"]) == (60_000, 60_000)
    assert shown["effective_config"]["learning_rate"] == 1e-6 and shown["config"]["learning_rate"] == 1e-2
    assert shown["current_epoch"] == int(shown["current_epoch"]) > 0, "it ended with an epoch, and saved"
    assert shown["checkpoint_path"].endswith(f"checkpoint-{shown['current_step']}")

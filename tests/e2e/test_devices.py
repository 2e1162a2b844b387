"""Promises about a run on several devices of one worker, with the whole service and real training on two CPU slots."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TrainingStack
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("idle")

HANG_SECONDS = 8
TWO: dict[str, Any] = {"resources": {"devices": 2}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingStack]:
    """A service with one worker of two devices."""
    stack = TrainingStack(tmp_path_factory.mktemp("devices"), hang_seconds=HANG_SECONDS)
    stack.add_worker(slots=2)
    yield stack
    stack.close()


@pytest.fixture
def idle(stack: TrainingStack) -> Iterator[None]:
    """Leave nothing in training, and no training process."""
    yield
    live = {"status": ["pending", "initializing", "running", "checkpointing"]}
    for run in stack.client.get("/v1/runs", params=live).json()["data"]:
        stack.stop(run["id"], save_checkpoint=False)
        stack.until(run["id"], "cancelled", "completed", "failed", timeout=60)
    eventually(lambda: processes(stack) == [], what="no training process is left")


def start(stack: TrainingStack, resources: dict[str, Any] = TWO["resources"], **config: Any) -> str:
    """Start a run on two devices; return its id."""
    config = {
        "base_model": "tiny", "method": "lora", "lora_r": 4, "learning_rate": 1e-2, "max_seq_length": 64,
        "packing": False, "batch_size": 2, "max_steps": 100_000, "save_steps": 10, "logging_steps": 1, **config,
    }  # fmt: skip
    return stack.create(config=config, backend="celery", dataset_id=stack.chats, resources=resources)


def processes(stack: TrainingStack) -> list[int]:
    """The recorded training processes of the worker, in the order of their start: by rank."""
    records = sorted(
        (stack.settings.home / "run" / "trainers").glob("*.json"), key=lambda path: path.stat().st_mtime_ns
    )
    return [json.loads(path.read_text())["trainer"]["pid"] for path in records]


def losses(stack: TrainingStack, run_id: str) -> dict[int, str]:
    return {step: loss for step, (loss, _) in stack.steps(run_id).items()}


def test_trains_evaluates_and_can_be_downloaded(stack: TrainingStack) -> None:
    run_id = start(stack, {"devices": "all"}, max_steps=6, save_steps=3, eval_split=0.1, eval_steps=3)
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    assert (shown["resources"]["devices"], shown["attempt"], shown["current_step"]) == (2, 1, 6)
    assert all(len(trained) == 4 * 2 * 2 for _, trained in stack.steps(run_id).values()), "two batches of each device"
    events = stack.events(run_id)
    assert [event["step"] for event in events if event["type"] == "metric"] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events if event["type"] == "eval"] == [3, 6]
    files = stack.client.get(f"/v1/runs/{run_id}/artifacts").json()["data"]
    assert "adapter_model.safetensors" in {file["path"] for file in files}
    request = {"model": run_id, "dataset_id": stack.chats, **TWO}
    evaluation = stack.client.post("/v1/runs/evaluate", json=request).json()["id"]
    shown = stack.until(evaluation, "completed", "failed", timeout=120)
    assert (shown["status"], shown["resources"]["devices"]) == ("completed", 2), shown["error_message"]
    assert shown["evaluation"]["eval_loss"] > 0


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_and_the_run_resumes(stack: TrainingStack, rank: int) -> None:
    run_id = start(stack, max_steps=60)
    stack.until_step(run_id, 15, timeout=120)
    before = processes(stack)
    assert len(before) == 2
    os.kill(before[rank], signal.SIGKILL)
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert (shown["status"], shown["attempt"]) == ("completed", 2), shown["error_message"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    report = stack.client.get(f"/v1/runs/{run_id}/postmortem").json()
    assert report["exit_signal"] == "SIGKILL" and f"the training process of rank {rank} " in report["probable_cause"]
    retried = next(event for event in stack.events(run_id) if "signal 9" in str(event.get("reason")))
    assert ("rank 1" in retried["reason"]) is (rank == 1)


def test_actions_take_effect_on_every_device_and_a_stop_leaves_a_checkpoint_from_which_one_device_goes_on(
    stack: TrainingStack,
) -> None:
    run_id = start(stack, eval_split=0.1, eval_steps=100_000)
    path = f"/v1/runs/{run_id}/actions"
    actions: list[dict[str, Any]] = [
        {"action": "set_learning_rate", "learning_rate": 1e-3}, {"action": "evaluate"}, {"action": "checkpoint"},
        {"action": "sample", "prompts": ["row 3"], "max_new_tokens": 4}, {"action": "extend", "max_steps": 100_002},
    ]  # fmt: skip
    for number, body in enumerate(actions):
        if number == 2:  # the others arrive while both devices train
            stack.until_step(run_id, 2, timeout=120)
        answer = stack.client.post(path, json=body)
        assert answer.status_code == 202, answer.text

    def answered() -> bool:
        return all(action["status"] != "waiting" for action in stack.client.get(path).json()["data"])

    eventually(answered, timeout=120, what="each action is answered")
    assert {action["status"] for action in stack.client.get(path).json()["data"]} == {"done"}
    shown = stack.run(run_id)
    assert (shown["attempt"], shown["total_steps"]) == (1, 100_002)
    extended = start(stack, max_steps=10, gradient_accumulation_steps=1)  # waits, so the action precedes its first step
    answer = stack.client.post(f"/v1/runs/{extended}/actions", json={"action": "extend", "max_steps": 12})
    assert answer.status_code == 202, answer.text
    stack.stop(run_id)
    stopped = stack.until(run_id, "cancelled", "failed", timeout=60)
    assert stopped["status"] == "cancelled", stopped["error_message"]
    refused = stack.client.post(f"/v1/runs/{run_id}/resume", json={"resources": {"devices": 3}})
    assert refused.json()["errors"][0]["field"] == "resources.devices"
    more = {"resources": {"devices": 1}, "stop_after_steps": 3}
    child = stack.client.post(f"/v1/runs/{run_id}/resume", json=more).json()["id"]
    shown = stack.until(child, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    assert shown["config"]["gradient_accumulation_steps"] == 8, "a step has as many rows as before"
    counts = {len(trained) for run in (run_id, child) for _, trained in stack.steps(run).values()}
    assert max(counts) == 16
    shown = stack.until(extended, "completed", "failed", timeout=120)
    assert (shown["status"], shown["attempt"], shown["current_step"]) == ("completed", 1, 12), shown["error_message"]
    assert sorted(stack.steps(extended)) == list(range(1, 13))


def test_a_stop_in_an_evaluation_ends_both_and_leaves_the_evaluation_to_the_resumed_run(stack: TrainingStack) -> None:
    run_id = start(stack, max_steps=4, eval_split=0.5, eval_steps=2, extra={"eval_batch_size": 1})
    eventually(lambda: _is_evaluating(stack, run_id), timeout=120, what="the run evaluates")
    stack.stop(run_id)
    shown = stack.until(run_id, "cancelled", "completed", "failed", timeout=60)
    assert shown["status"] in ("cancelled", "completed"), shown["error_message"]
    if shown["status"] == "cancelled":
        child = stack.client.post(f"/v1/runs/{run_id}/resume", json={}).json()["id"]
        shown = stack.until(child, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]


def _is_evaluating(stack: TrainingStack, run_id: str) -> bool:
    return any(event["type"] == "progress" and event["phase"] == "evaluating" for event in stack.events(run_id))


def test_what_one_device_trains_is_refused_at_once(stack: TrainingStack) -> None:
    config = {"base_model": "tiny"}
    body = {"backend": "celery", "dataset_id": stack.chats, "config": config}
    for more, code, says in (
        ({"resources": {"devices": 3}}, "too_many_devices", "no online worker has more than 2"),
        ({**TWO, "backend": "fake"}, "not_supported", "backend `fake`"),
    ):  # fmt: skip
        errors = stack.client.post("/v1/runs", json={**body, **more}).json()["errors"]
        device_errors = [error for error in errors if error["field"] == "resources.devices"]
        assert [error["code"] for error in device_errors] == [code] and says in device_errors[0]["message"], errors


@pytest.mark.full
def test_a_frozen_process_is_found_and_named_and_the_run_resumes(stack: TrainingStack) -> None:
    run_id = start(stack, max_steps=40)
    stack.until_step(run_id, 12, timeout=120)
    before = processes(stack)
    assert len(before) == 2
    os.kill(before[1], signal.SIGSTOP)
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert (shown["status"], shown["attempt"]) == ("completed", 2), shown["error_message"]
    reasons = [str(event.get("reason")) for event in stack.events(run_id) if event["type"] == "status"]
    assert any("hung" in reason and "the process of rank 1 was suspended" in reason for reason in reasons), reasons
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_a_divided_model_survives_a_kill_and_goes_on_undivided_on_one_device(stack: TrainingStack) -> None:
    two = {"devices": 2, "sharding": "full"}
    run_id = start(stack, two, method="full", lora_r=None, gradient_accumulation_steps=1)
    assert stack.run(run_id)["requirements"]["sharded"]
    stack.until_step(run_id, 15, timeout=120)
    os.kill(processes(stack)[1], signal.SIGKILL)
    eventually(lambda: stack.run(run_id)["attempt"] == 2, timeout=60, what="the run is tried again")
    stack.until_step(run_id, 20, timeout=120)
    facts = [event for event in stack.events(run_id) if event["type"] == "config"][-1]["facts"]
    assert facts["fidelity"] == "exact", facts["fidelity_reasons"]
    stack.stop(run_id)
    stopped = stack.until(run_id, "cancelled", "failed", timeout=60)
    assert stopped["status"] == "cancelled", stopped["error_message"]
    more = {"resources": {"devices": 1}, "stop_after_steps": 3}
    child = stack.client.post(f"/v1/runs/{run_id}/resume", json=more).json()["id"]
    shown = stack.until(child, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    files = {file["path"] for file in stack.client.get(f"/v1/runs/{child}/artifacts").json()["data"]}
    assert "model.safetensors" in files


def test_devices_that_share_sequences_train_stop_and_go_on(stack: TrainingStack) -> None:
    shared = {"devices": 2, "sequence_parallel": 2}
    body = {"backend": "celery", "dataset_id": stack.chats, "config": {"base_model": "tiny", "method": "lora"}}
    for parts in (3, 4):
        answer = stack.client.post("/v1/runs", json={**body, "resources": {**shared, "sequence_parallel": parts}})
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["field"]) == (422, "resources.sequence_parallel")
        assert error["message"].endswith("use one of 1, 2")
    run_id = start(stack, shared, packing=True, gradient_accumulation_steps=1, eval_split=0.1, eval_steps=10)
    stack.until_step(run_id, 12, timeout=120)
    stack.stop(run_id)
    stopped = stack.until(run_id, "cancelled", "failed", timeout=60)
    assert stopped["status"] == "cancelled", stopped["error_message"]
    assert [event["step"] for event in stack.events(run_id) if event["type"] == "eval"][:1] == [10]
    child = stack.client.post(f"/v1/runs/{run_id}/resume", json={"stop_after_steps": 3}).json()["id"]
    shown = stack.until(child, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    facts = next(event for event in stack.events(child) if event["type"] == "config")["facts"]
    assert facts["fidelity"] == "exact", facts["fidelity_reasons"]
    assert shown["requirements"]["sequence_parallel"] == 2
    files = {file["path"] for file in stack.client.get(f"/v1/runs/{child}/artifacts").json()["data"]}
    assert "adapter_model.safetensors" in files

"""Predictions through the whole service: killed, stopped and resumed, they write the file of an undisturbed one."""

import json
import os
import signal
from typing import Any

import pytest

from tests.e2e.conftest import TrainingStack
from tests.stack import pids_of_trainers
from tests.waiting import eventually

CONFIG = {"max_new_tokens": 40, "batch_tokens": 200}


def predict(stack: TrainingStack, model: str, **config: Any) -> str:
    body = {"model": model, "dataset_id": stack.chats, "config": {**CONFIG, **config}}
    answer = stack.client.post("/v1/runs/predict", json=body)
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


def checkpoints(stack: TrainingStack, run_id: str) -> list[int]:
    return [event["step"] for event in stack.events(run_id) if event["type"] == "checkpoint"]


def kill_after_next_checkpoint(stack: TrainingStack, run_id: str) -> None:
    before, attempts = len(checkpoints(stack, run_id)), len(pids_of_trainers(stack.journal(run_id)))
    eventually(lambda: len(checkpoints(stack, run_id)) > before)
    os.kill(pids_of_trainers(stack.journal(run_id))[-1], signal.SIGKILL)
    eventually(lambda: len(pids_of_trainers(stack.journal(run_id))) > max(attempts, 1), timeout=60)


def predictions(stack: TrainingStack, run_id: str) -> bytes:
    return stack.client.get(f"/v1/runs/{run_id}/artifacts/predictions.jsonl").content


@pytest.mark.full
def test_prediction_killed_stopped_and_resumed_writes_the_file_of_an_undisturbed_one(stack: TrainingStack) -> None:
    trained = stack.train(method="lora", max_steps=2, save_steps=1)
    assert stack.until(trained, "completed", "failed", timeout=120)["status"] == "completed"
    saved = stack.client.get(f"/v1/runs/{trained}/checkpoints").json()["data"][0]["id"]
    whole = predict(stack, saved)
    done = stack.until(whole, "completed", "failed", timeout=120)
    assert done["status"] == "completed", done["error_message"]
    rows = [json.loads(line) for line in predictions(stack, whole).splitlines()]
    assert [row["row"] for row in rows] == list(range(done["total_steps"]))
    assert done["current_step"] == len(rows)

    killed = predict(stack, saved)
    for _ in range(2):
        kill_after_next_checkpoint(stack, killed)
    before = len(checkpoints(stack, killed))
    eventually(lambda: len(checkpoints(stack, killed)) > before)
    assert stack.stop(killed).status_code == 202
    stopped = stack.until(killed, "cancelled", timeout=60)
    assert stopped["attempt"] == 3 and 0 < stopped["current_step"] < len(rows)
    assert checkpoints(stack, killed)[-1] == stopped["current_step"]
    answer = stack.client.post(f"/v1/runs/{killed}/resume", json={})
    assert answer.status_code == 202, answer.text
    again = stack.until(answer.json()["id"], "completed", "failed", timeout=120)
    assert again["status"] == "completed", again["error_message"]
    assert predictions(stack, again["id"]) == predictions(stack, whole)
    repeated = stack.client.post(f"/v1/runs/{again['id']}/resume", json={})
    assert (repeated.status_code, repeated.json()["code"]) == (422, "nothing_left_to_train")

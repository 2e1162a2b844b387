"""A judge through the whole service: the key goes from the stored secret to its host, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TrainingStack
from tests.worker.training.reward_services.service import RewardService, reward_service

KEY = "sk-key-of-ada-0123456789"


def judge(body: Any) -> dict[str, Any]:
    graded = json.loads(body["messages"][1]["content"])
    mark = 10 if "a" in graded["completion"] else 1
    usage = {"prompt_tokens": 50, "completion_tokens": 1}
    return {"choices": [{"message": {"content": str(mark)}}], "usage": usage}


def predict(stack: TrainingStack, service: RewardService) -> dict[str, Any]:
    reward = {
        "type": "judge", "url": f"http://127.0.0.1:{service.port}/v1", "model": "grader", "rubric": "10: it has an a.",
    }  # fmt: skip
    body = {"model": "tiny", "dataset_id": stack.chats, "config": {"max_new_tokens": 8, "rewards": [reward]}}
    answer = stack.client.post("/v1/runs/predict", json=body)
    return answer.json() | {"status_code": answer.status_code}


@pytest.mark.full
def test_judge_scores_a_prediction_with_the_stored_key(tmp_path: Path) -> None:
    with reward_service(judge) as service:
        stack = TrainingStack(tmp_path / "home", reward_private_hosts=f"127.0.0.1:{service.port}=judge_key")
        try:
            stack.add_worker(slots=1)
            refused = predict(stack, service)
            assert refused["status_code"] == 422 and "anneal secrets set judge_key" in json.dumps(refused)
            assert stack.client.put("/v1/secrets/judge_key", json={"value": KEY}).status_code == 200
            run_id = predict(stack, service)["id"]
            done = stack.until(run_id, "completed", "failed", timeout=120)
            assert done["status"] == "completed", done["error_message"]
            rows = [
                json.loads(line)
                for line in stack.client.get(f"/v1/runs/{run_id}/artifacts/predictions.jsonl").text.splitlines()
            ]
            marks = [float("a" in row["prediction"]) for row in rows]
            assert [row["scores"]["reward_judge"] for row in rows] == marks
            evaluation = done["evaluation"]
            assert evaluation["eval_reward_judge"] == pytest.approx(sum(marks) / len(marks))
            assert evaluation["eval_reward_calls"] == len(service.calls) == len(rows)
            assert evaluation["eval_reward_prompt_tokens"] == 50 * len(rows) and evaluation["eval_reward_missing"] == 0
            assert {call.headers["authorization"] for call in service.calls} == {f"Bearer {KEY}"}
            assert KEY not in json.dumps(stack.events(run_id))
            files = [path for path in stack.home.rglob("*") if path.is_file() and not path.is_symlink()]
            assert not [path for path in files if KEY.encode() in path.read_bytes()]
        finally:
            stack.close()

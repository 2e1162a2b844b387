"""A run whose teacher is another run, through the whole service: trained, resumed, evaluated, its teacher kept."""

import pytest

from tests.e2e.conftest import TrainingStack


@pytest.mark.full
def test_a_run_learns_from_the_output_of_another_and_keeps_it_from_deletion(stack: TrainingStack) -> None:
    def completed(run_id: str) -> str:
        done = stack.until(run_id, "completed", "failed", timeout=120)
        assert done["status"] == "completed", done["error_message"]
        return run_id

    teacher = completed(stack.train(method="lora", max_steps=2))
    gkd = {"teacher": teacher, "max_completion_length": 8}
    learned = completed(stack.train(method="gkd", packing=False, max_steps=2, save_steps=1, gkd=gkd))
    shown = stack.client.get(f"/v1/runs/{learned}").json()
    assert shown["reward_run_ids"] == [teacher]
    refused = stack.client.delete(f"/v1/runs/{teacher}")
    assert (refused.status_code, refused.json()["code"]) == (409, "run_is_needed")

    resumed = stack.client.post(f"/v1/runs/{learned}/resume", json={"config": {"max_steps": 4}})
    assert resumed.status_code == 202, resumed.text
    more = completed(resumed.json()["id"])
    assert stack.client.get(f"/v1/runs/{more}").json()["current_step"] == 4

    evaluated = stack.client.post("/v1/runs/evaluate", json={"model": more, "dataset_id": stack.chats})
    assert evaluated.status_code == 202, evaluated.text
    evaluation = stack.client.get(f"/v1/runs/{completed(evaluated.json()['id'])}").json()["evaluation"]
    assert evaluation["eval_loss"] >= 0

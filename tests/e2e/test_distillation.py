"""A run whose teacher is another run, through the whole service: trained, resumed, evaluated, its teacher kept."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import TrainingStack
from tests.nodes import ROOT
from tests.programs import shell_command
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model


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


@pytest.mark.full
def test_lines_of_the_guide_train_a_teacher_and_a_student_and_compare_them(
    stack: TrainingStack, tmp_path: Path
) -> None:
    for name, layers in (("Qwen/Qwen3-8B", 2), ("Qwen/Qwen3-0.6B", 1)):
        if not (stack.settings.models_folder / name).exists():
            make_tiny_model(stack.settings.models_folder / name, layers=layers)
    for file in ("chats.jsonl", "heldout.jsonl"):
        make_chat_dataset(tmp_path / file, 6)
    (block,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/guides/distillation.md").read_text(), re.M | re.S)
    program = f'anneal() {{ {shell_command("app.cli.main")} "$@"; }}\n{block}'
    done = subprocess.run(
        ["bash", "-eu", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(re.findall(r"^eval_rouge_l ", done.stdout, re.MULTILINE)) == 2
    assert "answers of the student" in done.stdout

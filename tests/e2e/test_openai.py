"""Jobs of OpenAI's client that train: paused, resumed and killed, they have the losses of a job never paused."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from app.openai.ids import to_native_id
from tests.e2e.conftest import QLORA, TrainingStack
from tests.openai.conftest import client_of
from tests.openai.test_guide import program_for
from tests.stack import pids_of_trainers
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset

PAUSES = 10


@pytest.fixture(scope="module")
def client(stack: TrainingStack) -> Iterator[openai.OpenAI]:
    with client_of(stack.api) as client:
        yield client


def create(stack: TrainingStack, client: openai.OpenAI, **config: Any) -> str:
    rows = stack.client.get(f"/v1/datasets/{stack.chats}/content").content
    file = client.files.create(file=("chats.jsonl", rows), purpose="fine-tune")
    # The undisturbed run learns all text; jobs on chats learn the answers unless they say otherwise.
    fields = {**QLORA, "loss_on": "all", **config}
    native = {name: value for name, value in fields.items() if name != "base_model"}
    anneal = {"config": native}
    return client.fine_tuning.jobs.create(model="tiny", training_file=file.id, extra_body={"anneal": anneal}).id


def runs_of(stack: TrainingStack, job_id: str) -> list[str]:
    """The runs of a job, oldest first."""
    ids = [str(to_native_id(job_id, "run"))]
    while children := stack.client.get("/v1/runs", params={"parent_run_id": ids[-1]}).json()["data"]:
        ids.append(children[0]["id"])
    return ids


def until(client: openai.OpenAI, job_id: str, *statuses: str) -> Any:
    def job_in_status() -> Any:
        job = client.fine_tuning.jobs.retrieve(job_id)
        return job if job.status in statuses else None

    return eventually(job_in_status, timeout=120, what=f"{job_id} becomes {' or '.join(statuses)}")


def steps(stack: TrainingStack, job_id: str) -> dict[int, tuple[str, list[int]]]:
    """Step → exact loss and rows, as trained last."""
    return {step: trained for run_id in runs_of(stack, job_id) for step, trained in stack.steps(run_id).items()}


def test_job_trains_pauses_and_resumes_under_its_id_with_the_losses_of_a_job_never_paused(
    stack: TrainingStack, client: openai.OpenAI, undisturbed: str, ends: None
) -> None:
    job_id = create(stack, client)
    eventually(lambda: any(line.get("step", 0) >= 15 for line in stack.journal(runs_of(stack, job_id)[0])), timeout=120)
    client.fine_tuning.jobs.pause(job_id)
    until(client, job_id, "paused")
    assert client.fine_tuning.jobs.resume(job_id).id == job_id
    done = until(client, job_id, "succeeded", "failed")
    assert done.status == "succeeded", done.error
    assert steps(stack, job_id) == stack.steps(undisturbed)
    assert done.trained_tokens > 0 and done.fine_tuned_model == runs_of(stack, job_id)[-1]
    assert client.models.retrieve(done.fine_tuned_model).id == done.fine_tuned_model
    metrics = [event for event in client.fine_tuning.jobs.list_events(job_id, limit=100) if event.type == "metrics"]
    assert len(metrics) >= 12
    assert client.fine_tuning.jobs.checkpoints.list(job_id).data[0].step_number == done_step(stack, job_id)


def done_step(stack: TrainingStack, job_id: str) -> int:
    step: int = stack.run(runs_of(stack, job_id)[-1])["current_step"]
    return step


def test_program_of_the_guide_trains_and_prints_its_model(
    stack: TrainingStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: None,
) -> None:
    make_chat_dataset(tmp_path / "train.jsonl", 8)
    monkeypatch.chdir(tmp_path)
    exec(program_for(stack.api, "tiny"), {})
    *messages, last = capsys.readouterr().out.splitlines()
    assert messages[0] == "The job has succeeded." and re.fullmatch(r"succeeded run_[0-9a-z]{26}", last)


@pytest.mark.full
def test_job_paused_ten_times_and_killed_in_between_has_the_losses_of_a_job_never_paused(
    stack: TrainingStack, client: openai.OpenAI, undisturbed: str, ends: None
) -> None:
    job_id = create(stack, client)
    for number in range(PAUSES):
        run_id = runs_of(stack, job_id)[-1]
        if number % 3 == 1:  # while it trains
            eventually(lambda at=run_id: stack.steps(at) or stack.run(at)["status"] == "completed", timeout=120)
        if number % 3 == 2:
            eventually(lambda at=run_id: stack.steps(at) or stack.run(at)["status"] == "completed", timeout=120)
            for pid in pids_of_trainers(stack.journal(run_id)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        try:
            client.fine_tuning.jobs.pause(job_id)
        except openai.ConflictError:
            break  # it has ended
        if until(client, job_id, "paused", "succeeded", "failed").status != "paused":
            break
        client.fine_tuning.jobs.resume(job_id)
    done = until(client, job_id, "succeeded", "failed")
    assert done.status == "succeeded", done.error
    assert steps(stack, job_id) == stack.steps(undisturbed)
    assert [job.id for job in client.fine_tuning.jobs.list() if job.training_file == done.training_file] == [job_id]

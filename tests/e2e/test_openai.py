"""Jobs of OpenAI's client that train: paused, resumed and killed, they have the losses of a job never paused."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from app.openai.ids import to_native_id
from tests.e2e.conftest import QLORA, TrainingStack
from tests.nodes import ROOT
from tests.openai.conftest import client_of
from tests.openai.test_guide import program_for
from tests.stack import pids_of_trainers
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset

PAUSES = 10
NODE_PACKAGE = "openai@7"
SECONDS = 300


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
def test_node_client_trains_a_model_streams_its_answer_and_unwraps_a_webhook(
    stack: TrainingStack, client: openai.OpenAI, tmp_path: Path, ends: None
) -> None:
    programs = Path(sys.prefix) / "bin"
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def output_of(*command: str) -> str:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=SECONDS * stack.slowness, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    output_of(str(programs / "npm"), "install", *options, "--prefix", str(tmp_path), NODE_PACKAGE)
    data = make_chat_dataset(tmp_path / "train.jsonl", 8)
    # A low rate, so that the model does not learn to answer nothing.
    config = {**QLORA, "method": "lora", "max_steps": 4, "save_steps": 2, "learning_rate": 1e-6}
    native = {"config": {name: value for name, value in config.items() if name != "base_model"}}
    printed = output_of(
        str(programs / "node"), str(ROOT / "tests" / "e2e" / "openai_client.mjs"), f"{stack.api.url}/openai/v1",
        stack.api.key, str(tmp_path / "node_modules"), str(data), json.dumps(native),
    )  # fmt: skip
    model, answer = (json.loads(printed)[name] for name in ("model", "answer"))
    assert stack.run(model)["status"] == "completed"
    question: Any = [{"role": "user", "content": "what is row 7"}]
    again = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=8)
    assert again.choices[0].message.content == answer


@pytest.mark.full
def test_job_paused_ten_times_and_killed_in_between_has_the_losses_of_a_job_never_paused(
    stack: TrainingStack, client: openai.OpenAI, undisturbed: str, ends: None
) -> None:
    job_id = create(stack, client)
    with stack.pace.slow_from(1):  # so that it does not end before the last pause
        for number in range(PAUSES):
            run_id = runs_of(stack, job_id)[-1]
            if number % 3:  # while it trains, else while it waits or starts
                eventually(lambda at=run_id: stack.steps(at), timeout=120, what=f"{run_id} trains")
            if number % 3 == 2:
                for pid in pids_of_trainers(stack.journal(run_id)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            client.fine_tuning.jobs.pause(job_id)
            paused = until(client, job_id, "paused", "succeeded", "failed")
            assert paused.status == "paused", (number, paused.error)
            client.fine_tuning.jobs.resume(job_id)
    done = until(client, job_id, "succeeded", "failed")
    assert done.status == "succeeded", done.error
    assert len(runs_of(stack, job_id)) == PAUSES + 1
    assert steps(stack, job_id) == stack.steps(undisturbed)
    assert [job.id for job in client.fine_tuning.jobs.list() if job.training_file == done.training_file] == [job_id]

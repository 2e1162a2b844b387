"""A QLoRA run through the whole service: followed, stopped, resumed, loaded, and disturbed in every way."""

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from anneal.client.client import Anneal
from tests import programs
from tests.e2e.conftest import QLORA, STEPS, TrainingStack
from tests.stack import Follower, assert_attempts_never_overlap, pids_of_trainers
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset


def final_loss(stack: TrainingStack, run_id: str) -> str:
    return stack.steps(run_id)[STEPS][0]


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(stack: TrainingStack, undisturbed: str) -> None:
    with stack.pace.slow_from(24):
        run_id = stack.train()
        follower = Follower(stack, run_id, reconnect_every=3)
        stack.until_step(run_id, 24)
        assert stack.stop(run_id).status_code == 202
        stopped = stack.until(run_id, "cancelled")
    ids = follower.join()
    assert ids == list(range(1, len(ids) + 1))
    assert follower.connections > 5
    saved = [event for event in stack.events(run_id) if event["type"] == "checkpoint"][-1]
    assert saved["kind"] == "stop" and saved["step"] == stopped["current_step"]

    answer = stack.client.post(f"/v1/runs/{run_id}/resume", json={})
    assert answer.status_code == 202, answer.text
    child = answer.json()
    assert child["parent_run_id"] == run_id
    follower = Follower(stack, child["id"], reconnect_every=3)
    stack.until(child["id"], "completed", timeout=120)
    ids = follower.join()
    assert ids == list(range(1, len(ids) + 1))

    both = {**stack.steps(run_id), **stack.steps(child["id"])}
    assert min(stack.steps(child["id"])) == saved["step"] + 1
    assert both == stack.steps(undisturbed), "losses as hex floats and sample ids"


@pytest.mark.full
def test_the_adapter_loads_with_plain_peft_and_generates(stack: TrainingStack, undisturbed: str) -> None:
    script = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[2]), sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "what is row 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
out = model.generate(**ids, max_new_tokens=8, do_sample=False)
print(out.shape[1] - ids["input_ids"].shape[1])
"""
    output, base = stack.run(undisturbed)["fine_tuned_model"], str(stack.settings.models_folder / "tiny")
    done = subprocess.run([sys.executable, "-c", script, output, base], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout.split()[-1]) <= 8


def test_the_weights_of_a_stopped_run_are_the_base_model_of_another(stack: TrainingStack, undisturbed: str) -> None:
    records = {"distributions_steps": 1, "memory_profile": "steps"}
    # On an adapter, whose base is named `tiny`.
    stopped = stack.train(base_model=undisturbed, max_steps=100_000, extra=records)
    stack.until_step(stopped, 2)
    assert stack.stop(stopped).status_code == 202
    stack.until(stopped, "cancelled")
    shown = [event for event in stack.events(stopped) if event["type"] == "distribution"]
    assert [event["step"] for event in shown][:2] == [1, 2] and shown[0]["groups"]
    assert all({*parts} == {"weights", "gradients"} for parts in shown[0]["groups"].values())
    listed = stack.client.get(f"/v1/runs/{stopped}/attempts/1/artifacts").json()["data"]
    names = ["distributions.jsonl", "log.txt.gz", "memory_profile.jsonl", "metrics.jsonl"]
    assert [one["path"] for one in listed] == names
    profile = stack.client.get(f"/v1/runs/{stopped}/attempts/1/artifacts/memory_profile.jsonl").text.splitlines()
    assert json.loads(profile[0])["step"] == 1
    (saved,) = stack.client.get(f"/v1/runs/{stopped}/checkpoints").json()["data"]
    answer = stack.client.post(f"/v1/runs/{stopped}/checkpoints/{saved['id']}/export", json={})
    assert answer.status_code == 202, answer.text
    exported = stack.until(answer.json()["id"], "completed", "failed", timeout=120)
    assert exported["status"] == "completed", exported["error_message"]
    (event,) = [event for event in stack.events(exported["id"]) if event["type"] == "export"]
    assert (event["weights"], event["step"]) == ("checkpoint", saved["step"])
    ends = [event["reason"] for event in stack.events(exported["id"]) if event["type"] == "status"]
    assert ends[-1].startswith(
        f"the checkpoint is exported; exported the weights of the checkpoint of step {saved['step']}"
    )
    places = [str(stack.settings.models_folder).encode(), str(stack.settings.storage_root).encode()]
    files = [path for path in Path(exported["fine_tuned_model"]).rglob("*") if path.is_file()]
    assert [path for path in files if any(place in path.read_bytes() for place in places)] == []

    child = stack.until(stack.train(base_model=exported["id"], max_steps=1), "completed", "failed", timeout=120)
    assert child["status"] == "completed", child["error_message"]
    archive = stack.client.get(f"/v1/runs/{stopped}/checkpoints/{saved['id']}/download")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert f"{saved['id']}/adapter_model.safetensors" in tar.getnames()


@pytest.mark.full
def test_an_evaluation_equals_that_of_the_training(stack: TrainingStack, tmp_path: Path) -> None:
    held_out = stack.upload(make_chat_dataset(tmp_path / "held_out.jsonl", 10).read_bytes(), "held_out.jsonl")
    config = {**QLORA, "method": "lora", "max_steps": 4, "save_steps": 2, "eval_steps": 2, "packing": False}
    run_id = stack.create(
        config=config, backend="celery", dataset_id=stack.chats, eval_dataset_id=held_out,
        extra_eval_datasets={"same": held_out, "seen": stack.chats},
    )  # fmt: skip
    trained = stack.until(run_id, "completed", "failed", timeout=120)
    assert trained["status"] == "completed", trained["error_message"]
    during = {event["step"]: event["metrics"] for event in stack.events(run_id) if event["type"] == "eval"}
    assert all(one["eval_same_loss"] == one["eval_loss"] != one["eval_seen_loss"] for one in during.values())
    curves = stack.client.get(f"/v1/runs/{run_id}/metrics", params={"names": "eval_seen_loss"}).json()["series"]
    assert curves["eval_seen_loss"]["values"] == [during[2]["eval_seen_loss"], during[4]["eval_seen_loss"]]
    saved = {one["step"]: one["id"] for one in stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]}
    with Anneal(stack.api.url, stack.api.key) as client:
        for model, step in ((run_id, 4), (saved[2], 2)):
            done = client.runs.evaluate({"model": model, "dataset_id": held_out})
            assert (done.status, done.task, done.attempt) == ("completed", "evaluate", 1), done.error_message
            assert done.evaluation is not None and done.fine_tuned_model is None
            assert done.evaluation["eval_loss"] == during[step]["eval_loss"] == done.best_eval
    service = {"ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key}
    shown = programs.anneal("eval", "tiny", "held_out.jsonl", "--set", "max_eval_rows=3", **service)
    assert shown.returncode == 0, shown.stderr
    assert "eval_loss" in shown.stdout and "evaluation of tiny" in shown.stderr
    assert "\nevaluating …\n" in shown.stderr


def test_a_run_shows_what_computes_it(stack: TrainingStack, undisturbed: str) -> None:
    shown = programs.anneal("runs", "show", undisturbed, ANNEAL_URL=stack.api.url, ANNEAL_API_KEY=stack.api.key)
    assert shown.returncode == 0, shown.stderr
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in shown.stdout.splitlines())
    kernels = "attention varlen, norms transformers, adapters fused, dropout torch, loss head two products"
    assert lines["kernels"] == kernels
    assert lines["precision"] == "computes in float32, base in 4 bits (nf4)"
    assert "planned step" not in lines, "it is measured on GPUs"
    (config,) = [event for event in stack.events(undisturbed) if event["type"] == "config"]
    assert stack.run(undisturbed)["facts"] == config["facts"]


def test_artifacts_metrics_and_logs_are_served(stack: TrainingStack, undisturbed: str) -> None:
    artifacts = stack.client.get(f"/v1/runs/{undisturbed}/artifacts").json()["data"]
    paths = {artifact["path"] for artifact in artifacts}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "metrics.jsonl"} <= paths
    card = stack.client.get(f"/v1/runs/{undisturbed}/artifacts/adapter_config.json")
    assert json.loads(card.text)["r"] == 4
    curve = stack.client.get(f"/v1/runs/{undisturbed}/metrics", params={"names": "loss"}).json()
    assert "loss" in json.dumps(curve)
    assert stack.client.get(f"/v1/runs/{undisturbed}/logs").status_code == 200


def test_kill_9_of_every_process_one_after_another_changes_nothing(stack: TrainingStack, undisturbed: str) -> None:
    with stack.pace.slow_from(12):
        run_id = stack.train()
        follower = Follower(stack, run_id)
        stack.until_step(run_id, 12, timeout=120)
        stack.workers[-1].kill()
        worker = stack.add_worker(slots=1)
        eventually(lambda: len(pids_of_trainers(stack.journal(run_id))) == 2, timeout=60, what="a second attempt")

    with stack.pace.slow_from(25):
        stack.until_step(run_id, 25, timeout=120)
        (trainer,) = pids_of_trainers(stack.journal(run_id))[-1:]
        zygote = psutil.Process(trainer).parent()
        assert zygote is not None and zygote.pid != worker.process.pid
        zygote.kill()
        eventually(lambda: len(pids_of_trainers(stack.journal(run_id))) == 3, timeout=60, what="a third attempt")
        stack.until_step(run_id, 28, timeout=120)
        stack.api.kill()
        stack.api.start()
        stack.api.wait_until_up()
        stack.until_step(run_id, 32, timeout=120)
        stack.kill_postgres()
        stack.until_step(run_id, 36, timeout=120)
        stack.kill_valkey()

    stack.until(run_id, "completed", timeout=120)
    ids = follower.join()
    assert ids == list(range(1, len(ids) + 1))
    assert_attempts_never_overlap(stack.journal(run_id))
    assert stack.steps(run_id) == stack.steps(undisturbed)
    assert final_loss(stack, run_id) == final_loss(stack, undisturbed)

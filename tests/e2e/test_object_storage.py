"""Hosts that share no folder: an object store holds everything, and each worker has a home of its own."""

import io
import json
import os
import pwd
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TrainingStack
from tests.object_store import SECRET, s3_server
from tests.reliability.test_stalls import confined
from tests.stack import WorkerProcess, is_alive
from tests.waiting import eventually
from tests.worker.training.output.test_gguf import CONVERTER
from tests.worker.training.tiny import make_pairs, make_prompts
from worker.wire.journal import read_journal

CONFIG = {
    "base_model": "tiny", "method": "lora", "lora_r": 4, "lora_dropout": 0.1, "learning_rate": 1e-2,
    "max_seq_length": 64, "packing": False, "batch_size": 2, "max_steps": 40, "save_steps": 10, "logging_steps": 10,
}  # fmt: skip


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store."""
    if request.param == "file":
        (tmp_path / "share").mkdir()
        yield f"file://{tmp_path}/share"
    else:
        with s3_server("anneal"):
            yield "s3://anneal/team"


class Host:
    """Home of a worker, with its own copy of the base model."""

    def __init__(self, home: Path, models: Path) -> None:
        self.home = home
        shutil.copytree(models, home / "models")

    @property
    def settings(self) -> dict[str, Any]:
        return {"home": self.home, "models_root": self.home / "models", "slots": 1}

    def journal(self, run_id: str) -> list[dict[str, Any]]:
        path = self.home / "cache" / "runs" / run_id / "journal.jsonl"
        return read_journal(path) if path.exists() else []

    def manifests(self, run_id: str) -> list[Path]:
        return list((self.home / "cache" / "runs" / run_id).rglob("manifest.json"))

    def steps(self, run_id: str) -> dict[int, tuple[str, list[int]]]:
        lines = [line for line in self.journal(run_id) if line["event"] == "step"]
        return {line["step"]: (line["loss_hex"], line["samples"]) for line in lines}


def train(stack: TrainingStack, **config: Any) -> str:
    return stack.create(config={**CONFIG, **config}, backend="celery", dataset_id=stack.chats)


def completed(stack: TrainingStack, run_id: str, timeout: float = 120) -> dict[str, Any]:
    shown = stack.until(run_id, "completed", "failed", timeout=timeout * stack.slowness)
    assert shown["status"] == "completed", shown["error_message"]
    return shown


def test_a_run_of_a_lost_host_is_continued_exactly_on_one_that_shares_no_folder(url: str, tmp_path: Path) -> None:
    stack = TrainingStack(tmp_path / "api", storage=url)
    try:
        first = Host(tmp_path / "first", stack.settings.models_folder)
        lost = stack.add_worker(**first.settings)
        whole = train(stack)
        completed(stack, whole)
        expected = first.steps(whole)

        with stack.pace.slow_from(11):
            run_id = train(stack)
            path = f"/v1/runs/{run_id}/checkpoints"
            eventually(lambda: [one for one in stack.client.get(path).json()["data"] if "remote" in one["copies"]], 120)
            records = [json.loads(path.read_text()) for path in (first.home / "run" / "trainers").glob("*.json")]
            trainers = [record["trainer"]["pid"] for record in records]
            assert trainers
            lost.kill()
        eventually(lambda: not any(map(is_alive, trainers)), timeout=60)
        shutil.rmtree(first.home)
        second = Host(tmp_path / "second", stack.settings.models_folder)
        stack.add_worker(**second.settings)
        shown = completed(stack, run_id)
        assert shown["attempt"] == 2 and shown["fine_tuned_model"] == f"{url}/runs/{run_id}/a2/output"
        resumed = second.steps(run_id)
        assert min(resumed) > 10 and max(resumed) == 40
        assert resumed == {step: expected[step] for step in resumed}

        weights = {id: download(stack.client, id, "adapter_model.safetensors") for id in (whole, run_id)}
        assert weights[whole] == weights[run_id]
        # Only the store has the output of the first run and its base.
        assert completed(stack, train(stack, base_model=whole, max_steps=2))["current_step"] == 2
        records = stack.client.get(f"/v1/runs/{whole}/attempts/1/artifacts").json()["data"]
        assert [one["path"] for one in records] == ["log.txt.gz", "metrics.jsonl"]
        lines = stack.client.get(f"/v1/runs/{whole}/logs").text.splitlines()
        complete = stack.client.get(f"/v1/runs/{whole}/logs/complete").text.splitlines()
        assert lines and {*lines} <= {line.split(" ", 3)[-1] for line in complete}
        saved = stack.client.get(f"/v1/runs/{whole}/checkpoints").json()["data"][0]
        archive = stack.client.get(f"/v1/runs/{whole}/checkpoints/{saved['id']}/download").content
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            assert f"{saved['id']}/manifest.json" in tar.getnames()
        evaluated = stack.client.post("/v1/runs/evaluate", json={"model": whole, "dataset_id": stack.chats})
        assert evaluated.status_code == 202, evaluated.text
        completed(stack, evaluated.json()["id"])
        files = [path for home in (second.home, stack.home) for path in home.rglob("*") if path.is_file()]
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
        assert not list((stack.settings.storage_root / "runs").glob("*")), "the API keeps no copy"
    finally:
        stack.close()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_on_two_hosts_that_share_no_folder_survives_the_loss_of_one_and_continues_exactly(
    url: str, tmp_path: Path
) -> None:
    stack = TrainingStack(tmp_path / "api", storage=url)
    hosts: dict[WorkerProcess, Host] = {}

    def add() -> None:
        host = Host(tmp_path / f"host-{len(hosts)}", stack.settings.models_folder)
        hosts[stack.add_worker(**host.settings, group_interface="lo")] = host

    def start() -> str:
        config = {name: value for name, value in CONFIG.items() if not name.startswith("lora")}
        resources = {"devices": 2, "hosts": 2, "sharding": "full"}
        config |= {"method": "full", "optim": "adamw_torch", "max_steps": 120}
        return stack.create(config=config, backend="celery", dataset_id=stack.chats, resources=resources)

    def steps(run_id: str) -> dict[int, tuple[str, list[int]]]:
        """Steps by their number, as the rank 0 of the last attempt wrote them."""
        return next(filter(None, (host.steps(run_id) for host in reversed(hosts.values()))))

    try:
        add()
        add()
        whole = start()
        completed(stack, whole, 400)
        expected = steps(whole)

        run_id = start()
        path = f"/v1/runs/{run_id}/checkpoints"
        eventually(lambda: [one for one in stack.client.get(path).json()["data"] if "remote" in one["copies"]], 120)
        workers = {one["id"]: one["pid"] for one in stack.client.get("/v1/workers").json()["data"]}
        lead = workers[stack.run(run_id)["worker_id"]]
        (member,) = [worker for worker in hosts if worker.process.pid != lead]
        writers = [worker.process.pid for worker, host in hosts.items() if host.manifests(run_id)]
        assert writers == [lead], "the lead writes the checkpoint"
        trainers = [process.pid for process in member.descendants()]
        member.kill()
        eventually(lambda: not any(map(is_alive, trainers)), timeout=60)
        shutil.rmtree(hosts[member].home)
        add()
        shown = completed(stack, run_id, 400)
        assert shown["attempt"] > 1
        facts = [event for event in stack.events(run_id) if event["type"] == "config"][-1]["facts"]
        assert facts["fidelity"] == "exact", facts["fidelity_reasons"]
        resumed = {}
        for host in hosts.values():
            resumed |= host.steps(run_id)
        assert max(resumed) == 120 and resumed == {step: expected[step] for step in resumed}
        weights = {id: download(stack.client, id, "model.safetensors") for id in (whole, run_id)}
        assert weights[whole] == weights[run_id]
        left = [path for host in hosts.values() for path in host.home.rglob(".checkpoint-*")]
        assert left == [], "no host keeps parts of checkpoints"
    finally:
        stack.close()


def download(client: httpx.Client, run_id: str, name: str) -> bytes:
    """The file alone, in ranges and in the archive, which must be the same."""
    path = f"/v1/runs/{run_id}/artifacts"
    (listed,) = [one for one in client.get(path).json()["data"] if one["path"] == name]
    answer = client.get(f"{path}/{name}")
    assert answer.status_code == 200 and len(answer.content) == listed["bytes"]
    part = client.get(f"{path}/{name}", headers={"Range": "bytes=5-8"})
    assert part.status_code == 206 and part.content == answer.content[5:9]
    with tarfile.open(fileobj=io.BytesIO(client.get(f"{path}.tar").content)) as archive:
        member = archive.extractfile(f"{run_id}/{name}")
        assert member is not None and member.read() == answer.content
    return answer.content


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Temporary folder that every user may enter, as each session of pytest makes its own private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.full
def test_every_kind_of_run_finds_what_it_needs_in_the_store_alone(open_folder: Path, tmp_path: Path) -> None:
    """Workers keep no copy of anything between two runs. Trainers of the first have a user of their own."""
    is_root = os.getuid() == 0
    user = pwd.getpwnam("nobody") if is_root else pwd.getpwuid(os.getuid())
    (tmp_path / "share").mkdir()
    stack = TrainingStack(tmp_path / "api", storage=f"file://{tmp_path}/share")
    try:
        cache, models = open_folder / "cache", open_folder / "models"  # not in the home, which is private
        shutil.copytree(stack.settings.models_folder, models)
        for path in models.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors lets only their writer read the weights
        (open_folder / "convert.py").write_text(CONVERTER)
        places = {"home": tmp_path / "host", "cache": cache, "cache_bytes": 0, "models_root": models, "slots": 1}
        separate = stack.add_worker(confined("worker") if is_root else (), **places, trainer_user=user.pw_name)

        base = completed(stack, train(stack, max_steps=4, save_steps=2))["id"]
        eventually(lambda: not list((cache / "runs").glob("*/a*")), what="nothing is kept")
        *_, earliest = stack.client.get(f"/v1/runs/{base}/checkpoints").json()["data"]

        for model in (base, earliest["id"]):
            evaluated = stack.client.post("/v1/runs/evaluate", json={"model": model, "dataset_id": stack.chats})
            assert evaluated.status_code == 202, evaluated.text
            assert completed(stack, evaluated.json()["id"])["evaluation"]

        # The other user may be unable to start an interpreter in a folder of root's own.
        separate.terminate()
        stack.add_worker(**places, gguf_converter=str(open_folder / "convert.py"))
        path = f"/v1/runs/{base}/checkpoints/{earliest['id']}/export"
        exported = stack.client.post(path, json={"output": "merged", "gguf": "q8_0"})
        assert exported.status_code == 202, exported.text
        whole = completed(stack, exported.json()["id"])["id"]
        assert stack.client.get(f"/v1/runs/{whole}/artifacts/model.gguf").content.startswith(b"GGUF")

        of_pairs = stack.upload(make_pairs(tmp_path / "pairs.jsonl", 24).read_bytes(), "pairs.jsonl")
        judge = {**CONFIG, "base_model": whole, "method": "reward", "max_steps": 2}
        judged = completed(stack, stack.create(config=judge, backend="celery", dataset_id=of_pairs))["id"]
        prompts = stack.upload(make_prompts(tmp_path / "prompts.jsonl", 24).read_bytes(), "prompts.jsonl")
        rewards = [{"type": "model", "model": judged, "weight": 1.0}]
        rlhf = {"num_generations": 2, "max_completion_length": 8, "rewards": rewards}
        config = {**CONFIG, "base_model": base, "method": "rlhf", "max_steps": 2, "rlhf": rlhf, "save_steps": 1}
        tuned = completed(stack, stack.create(config=config, backend="celery", dataset_id=prompts))["id"]

        resumed = stack.client.post(f"/v1/runs/{tuned}/resume", json={"config": {"max_steps": 3}})
        assert resumed.status_code == 202, resumed.text
        shown = completed(stack, resumed.json()["id"])
        assert (shown["current_step"], shown["attempt"]) == (3, 1)
        eventually(lambda: not list((cache / "datasets").iterdir()), what="all is fetched for each run")
    finally:
        stack.close()

"""The whole service with real training: uvicorn, PostgreSQL, Valkey, a Celery worker with its zygote, TRL on a CPU."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from tests import zygotes
from tests.browser import chromium
from tests.stack import Stack, WorkerProcess
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model

__all__ = ["chromium"]

STEPS = 60
QLORA: dict[str, Any] = {
    "base_model": "tiny",
    "method": "qlora",
    "lora_r": 4,
    "lora_dropout": 0.1,
    "learning_rate": 1e-2,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "save_steps": 10,
    "logging_steps": 5,
    "max_seq_length": 128,
    "packing": True,
}


_zygotes: zygotes.Server | None = None


class TrainingStack(Stack):
    """A stack with a tiny model below its models root and a mix of two chat datasets."""

    def __init__(self, home: Path, **values: Any) -> None:
        super().__init__(home, launch="zygote", **values)
        self.pace = zygotes.Pace(home / "pace")
        make_tiny_model(self.settings.models_folder / "tiny", hidden=64, layers=2, dropout=0.1)
        self.chats = self._mixed(home)

    def _start_worker(self, settings: Settings, log: Path, under: Sequence[str]) -> WorkerProcess:
        if _zygotes is None or under:
            return super()._start_worker(settings, log, under)
        variables = {**_zygotes.variables(settings.trainer_environment()), **self.pace.variables()}
        return WorkerProcess(settings, log, program="tests.zygotes", variables=variables)

    def _mixed(self, home: Path) -> str:
        """Mix two chat datasets of 90 and 60 rows with weights; answers the id."""
        sources = [
            {"dataset_id": self.upload(make_chat_dataset(home / name, rows).read_bytes(), name), "weight": weight}
            for name, rows, weight in (("chats.jsonl", 90, 3), ("more.jsonl", 60, 1))
        ]
        answer = self.client.post("/v1/datasets/mix", json={"name": "mixed", "sources": sources})
        assert answer.status_code == 201, answer.text
        mixed: str = answer.json()["id"]
        return mixed

    def train(self, *, priority: int = 0, **config: Any) -> str:
        """A QLoRA run on the CPU; answers its id."""
        config = {**QLORA, **config}
        return self.create(config=config, backend="celery", dataset_id=self.chats, priority=priority)

    def steps(self, run_id: str) -> dict[int, tuple[str, list[int]]]:
        """Step → exact loss and row ids, as the attempt that trained the step last wrote them down."""
        lines = [line for line in self.journal(run_id) if line["event"] == "step"]
        return {line["step"]: (line["loss_hex"], line["samples"]) for line in lines}


@pytest.fixture(scope="session", autouse=True)
def forked_zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zygotes.Server]:
    """Fork the zygotes of the workers from a process that has imported the training code."""
    global _zygotes
    with zygotes.server(tmp_path_factory.getbasetemp() / "zygotes" / "server") as _zygotes:
        yield _zygotes
    _zygotes = None


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingStack]:
    options: dict[str, Any] = {
        "preempt_after_seconds": 0,
        "preempt_min_seconds": 0,
        "webhook_private_hosts": "127.0.0.1",
    }
    stack = TrainingStack(tmp_path_factory.mktemp("e2e"), **options)
    stack.add_worker(slots=1)
    yield stack
    stack.close()


@pytest.fixture
def ends(stack: TrainingStack) -> Iterator[None]:
    """Leave the API up and nothing in training, also after a failure: further tests use the same stack."""
    yield
    if stack.api.process.poll() is not None:
        stack.api.start()
        stack.api.wait_until_up()
    live = stack.client.get("/v1/runs", params={"status": ["pending", "initializing", "running", "checkpointing"]})
    for run in live.json()["data"]:
        stack.stop(run["id"], save_checkpoint=False)
        stack.until(run["id"], "cancelled", "completed", "failed", timeout=60)


@pytest.fixture(scope="session")
def undisturbed(stack: TrainingStack) -> str:
    """A run from beginning to end that nobody disturbs; its id."""
    run_id = stack.train()
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert (shown["status"], shown["attempt"]) == ("completed", 1), shown["error_message"]
    return run_id

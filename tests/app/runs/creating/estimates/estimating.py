"""Workers with GPUs, and requests for estimates of runs on the base model `qwen`."""

from typing import Any

from sqlalchemy import Engine, update

from app.tables.workers import Device
from tests.rows import add_worker
from tests.server import ApiServer

# Qwen3-8B, as its config.json has it.
QWEN = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip


def gpu(
    engine: Engine, memory_mb: int, name: str = "NVIDIA H100", devices: int = 1, packages: list[str] | None = None
) -> None:
    """A worker with GPUs of that memory."""
    worker = add_worker(engine, devices, backends=["celery"], packages=packages)
    is_it = update(Device).where(Device.worker_id == worker)
    with engine.begin() as connection:
        connection.execute(is_it.values(kind="cuda", name=name, memory_mb=memory_mb))


def estimated(api: ApiServer, dataset: str, resources: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """What POST /v1/runs/estimate answers for a run on that model."""
    body = {"dataset_id": dataset, "config": {"base_model": "qwen", **config}, "resources": resources or {}}
    answer = api.client.post("/v1/runs/estimate", json=body)
    assert answer.status_code == 200, answer.text
    estimate: dict[str, Any] = answer.json()
    return estimate

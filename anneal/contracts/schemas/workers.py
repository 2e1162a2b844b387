"""Wire models of workers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.device_telemetry import DeviceTelemetry
from anneal.contracts.field_types import Timestamp
from anneal.contracts.schemas.runs.common import RUN_ID
from anneal.contracts.schemas.short_repr import ShortRepr


class DeviceState(DeviceTelemetry):
    """Newest telemetry of a device."""

    at: Timestamp = Field(description="End of the time that the figures cover.")


class DeviceRead(BaseModel):
    """Device that one training process at a time can use."""

    model_config = ConfigDict(from_attributes=True)

    index: int
    uid: str = Field(description="Hardware id, such as a GPU UUID.")
    kind: Literal["cpu", "cuda"]
    name: str
    memory_mb: int | None
    run_id: str | None = Field(description="Run that currently uses it.")
    trouble: str | None = Field(
        description="Error of the device, or other programs that use its memory; null once it works again."
    )
    paused_until: Timestamp | None = Field(description="Time until which it takes no run because of that.")
    telemetry: DeviceState | None = Field(
        description="Its newest telemetry, every ten seconds; null for CPUs and before the first."
    )


class WorkerRead(ShortRepr):
    """Worker process, from its start to its end."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "wrk_01k3x9m6q2v8s4t0w7y5z1a3c0",
                "host": "gpu-1",
                "pid": 4711,
                "version": "0.1.0",
                "state": "online",
                "slots": 1,
                "backends": ["celery"],
                "labels": ["gpu=h100", "site-b"],
                "launch_mode": "zygote",
                "launch_reason": "",
                "plugins": {"optimizer": ["lion-schedule-free"], "reward": ["unit_tests"]},
                "packages": ["torchao"],
                "joins_hosts": True,
                "gguf": True,
                "gguf_quantizer": True,
                "started_at": "2026-01-02T03:04:05.678Z",
                "heartbeat_at": "2026-01-02T04:04:05.678Z",
                "devices": [
                    {
                        "index": 0,
                        "uid": "GPU-6f1c0a52",
                        "kind": "cuda",
                        "name": "NVIDIA H100",
                        "memory_mb": 81559,
                        "run_id": RUN_ID,
                        "trouble": None,
                        "paused_until": None,
                        "telemetry": {
                            "at": "2026-01-02T04:04:01.002Z",
                            "seconds": 10.0,
                            "utilization_percent": 97.4,
                            "memory_mb": 61204,
                            "temperature_celsius": 63,
                            "power_watts": 512.3,
                            "sm_clock_mhz": 1845.0,
                            "ecc_uncorrected": 0,
                        },
                    }
                ],
                "runs": [RUN_ID],
            }
        },
    )

    id: str
    host: str
    pid: int
    version: str
    state: Literal["online", "draining", "offline"] = Field(
        description="`offline`: it has ended, or sent no heartbeat for three lease times."
    )
    slots: int
    backends: list[str]
    labels: list[str] = Field(description="Labels from its `ANNEAL_WORKER_LABELS`; runs ask for them in `resources`.")
    launch_mode: Literal["zygote", "cold"] = Field(
        description="Start mode of training processes: `zygote` forks from a warm process, `cold` starts a new one."
    )
    launch_reason: str = Field(description="Reason for cold starts; empty otherwise.")
    plugins: dict[str, list[str]] | None = Field(
        description="Names of installed plugins, by kind; null if the worker's version does not report them."
    )
    packages: list[str] | None = Field(
        description="Installed packages that single optimizers need, such as `torchao`, and `liger-kernel`, which "
        "changes estimates; null if the worker's version does not report them."
    )
    joins_hosts: bool = Field(
        description="True if it trains runs together with other workers (`resources.hosts`): the operator has set "
        "`ANNEAL_GROUP_INTERFACE`."
    )
    gguf: bool = Field(description="True if it can write GGUF files: the operator has set `ANNEAL_GGUF_CONVERTER`.")
    gguf_quantizer: bool = Field(description="True if these may be quantized: it has `llama-quantize` of llama.cpp.")
    started_at: Timestamp
    heartbeat_at: Timestamp
    devices: list[DeviceRead]
    runs: list[str] = Field(description="Ids of its current runs.")

"""C15: two devices against one: time to the first optimizer step, and time of a stop with a checkpoint.

A worker with two CPU slots and a warm zygote trains the same LoRA of a random 2-layer Llama on one and on two devices,
in turns. The first step is timed from before the request until the trainer writes it to the journal (both on
CLOCK_BOOTTIME); a stop from before its request until the run has ended with a checkpoint, by the clock of the service.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.stack import Stack
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model

ROUNDS = 31
CONFIG: dict[str, Any] = {
    "base_model": "tiny", "method": "lora", "lora_r": 4, "batch_size": 2, "gradient_accumulation_steps": 1,
    "max_seq_length": 128, "optim": "adamw_torch", "save_steps": 100_000,
}  # fmt: skip


def main(scale: float = 1.0) -> bool:
    """Print medians; return True if two devices take at most 1.5 times as long to the first step, and 1 s to stop."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        service, rounds = _Service(Path(folder)), max(round(ROUNDS * scale), 1)
        try:
            for devices in (1, 2):
                service.first_step(devices)  # the zygote is ready when its first run has ended
            first = _in_turns(service.first_step, rounds)
            stops = _in_turns(service.stop, rounds)
        finally:
            service.close()
    ratio = statistics.median(two / one for one, two in zip(first[1], first[2], strict=True))
    for what, times in (("first step", first), ("stop", stops)):
        for devices, took in times.items():
            print(f"C15 {what:10s} on {devices} device(s)  median {statistics.median(took):5.2f} s  "
                  f"min {min(took):5.2f}  max {max(took):5.2f}")  # fmt: skip
    print(f"C15 two devices take {ratio:.2f} times as long to the first step")
    return ratio <= 1.5 and statistics.median(stops[2]) <= 1.0


def _in_turns(measure: Callable[[int], float], rounds: int) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for devices, took in times.items():
            took.append(measure(devices))
    return times


class _Service:
    """Service with one worker of two devices."""

    def __init__(self, home: Path) -> None:
        self._stack = Stack(home, launch="zygote", lease_seconds=60)
        make_tiny_model(self._stack.settings.models_folder / "tiny", hidden=64)
        data = make_chat_dataset(home / "data" / "train.jsonl", 64)
        self._dataset = self._stack.upload(data.read_bytes(), "train.jsonl")
        self._stack.add_worker(slots=2)

    def first_step(self, devices: int) -> float:
        """Return the seconds from the request to the first step of a new run, after the run has ended."""
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        run_id = self._start(devices, max_steps=1)
        self._stack.until(run_id, "completed", timeout=120)
        return next(line["t"] for line in self._stack.journal(run_id) if line["event"] == "step") - began

    def stop(self, devices: int) -> float:
        """Return the seconds from the request of a stop to the end of the run, which has saved a checkpoint."""
        run_id = self._start(devices, max_steps=100_000)
        self._stack.until_step(run_id, 10, timeout=120)
        began = time.time()
        self._stack.stop(run_id)
        shown = self._stack.until(run_id, "cancelled", timeout=120)
        (saved,) = self._stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        if saved["kind"] != "stop":
            raise RuntimeError(f"the stop has saved no checkpoint: {saved}")
        return datetime.fromisoformat(shown["finished_at"]).timestamp() - began

    def close(self) -> None:
        self._stack.close()

    def _start(self, devices: int, **config: Any) -> str:
        resources = {"devices": devices}
        return self._stack.create(
            config={**CONFIG, **config}, backend="celery", dataset_id=self._dataset, resources=resources
        )

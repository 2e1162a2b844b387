"""`make prediction`: error of the predicted finish after a tenth of a run, over 30 runs of mixed size.

A service with a worker of three slots trains them in a seeded order: runs of the fake backend, whose step times are
seeded and jitter, and small language models that train on the same cores at the same time. When the list of runs first
shows a tenth of the steps, the predicted remaining time is recorded and later compared with the actual one. The exit
code is 1 if the median relative error exceeds 20 %.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.stack import Stack
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model

RUNS, REAL = 30, 8
SLOTS = 3
GOAL = 0.20
MOST_SECONDS = 460.0
_POLL_SECONDS = 0.2


@dataclass
class Tried:
    """Run with its predicted and actual finish."""

    kind: str
    steps: int
    at_step: int | None = None
    seen_at: datetime | None = None
    finish_at: datetime | None = None
    confidence: str = ""
    finished_at: datetime | None = None
    seconds: float = 0.0

    @property
    def predicted(self) -> float:
        """Predicted seconds to the end."""
        assert self.finish_at is not None and self.seen_at is not None
        return (self.finish_at - self.seen_at).total_seconds()

    @property
    def took(self) -> float:
        """Actual seconds to the end."""
        assert self.finished_at is not None and self.seen_at is not None
        return (self.finished_at - self.seen_at).total_seconds()

    @property
    def error(self) -> float:
        """Relative error of the predicted time to the end."""
        return abs(self.predicted - self.took) / self.took


def main(scale: float = 1.0) -> bool:
    """Print a row for each run and the median; return True if the goal is reached."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        service = Stack(Path(folder), lease_seconds=30, slots=SLOTS, launch="auto")
        try:
            make_tiny_model(service.settings.models_folder / "tiny", hidden=128, layers=4)
            chats = service.upload(make_chat_dataset(Path(folder) / "chats.jsonl", 200).read_bytes(), "chats.jsonl")
            service.add_worker()
            tried = {_create(service, chats, body): one for body, one in _bodies(scale)}
            _watch(service, tried)
        finally:
            service.close()
    return _show(list(tried.values()))


def _bodies(scale: float) -> list[tuple[dict[str, Any], Tried]]:
    """Return the runs in the order in which they are created."""
    chance = random.Random(7)
    bodies: list[tuple[dict[str, Any], Tried]] = []
    count, real = max(round(RUNS * scale), 4), max(round(REAL * scale), 1)
    for number in range(count - real):
        steps, jitter = round(chance.uniform(40, 400)), round(chance.uniform(0, 0.8), 2)
        # From 6 to 40 seconds.
        extra = {
            "steps": steps, "step_seconds": round(6.0 * chance.uniform(1, 6.5) / steps, 4), "step_jitter": jitter,
            "load_seconds": round(chance.uniform(0, 1), 2), "save_seconds": round(chance.uniform(0, 0.3), 2),
            "log_lines_per_step": 0,
        }  # fmt: skip
        config = {
            "base_model": f"any-{number % 5}", "method": "sft", "seed": number, "save_steps": max(steps // 4, 1),
            "logging_steps": chance.choice([1, 5, max(steps // 20, 1)]), "extra": extra,
        }  # fmt: skip
        kind = f"fake, {extra['step_seconds'] * 1000:.0f} ms a step, jitter {jitter}"
        bodies.append(({"backend": "fake", "config": config}, Tried(kind, steps)))
    for _ in range(real):
        method, steps = chance.choice(["full", "lora"]), round(chance.uniform(60, 200))
        batch = chance.choice([2, 4, 8])
        config = {
            "base_model": "tiny", "method": method, "max_steps": steps, "batch_size": batch,
            "gradient_accumulation_steps": 1, "max_seq_length": 64, "optim": "adamw_torch", "save_steps": 50,
            "logging_steps": 5, **({"eval_split": 0.2, "eval_steps": 30} if batch == 4 else {}),
        }  # fmt: skip
        body = {"backend": "celery", "config": config}
        bodies.append((body, Tried(f"tiny model, {method}, batch size {batch}", steps)))
    chance.shuffle(bodies)
    return bodies


def _create(service: Stack, chats: str, body: dict[str, Any]) -> str:
    # Its dataset; the fake backend accepts any.
    answer = service.client.post("/v1/runs", json={"dataset_id": chats, **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def _watch(service: Stack, tried: dict[str, Tried]) -> None:
    """Poll the list of runs until all have ended."""
    ends = time.monotonic() + MOST_SECONDS
    while any(one.finished_at is None for one in tried.values()):
        if time.monotonic() > ends:
            raise SystemExit("The runs have not ended in time: the machine is too busy for figures.")
        runs = service.client.get("/v1/runs", params={"limit": 200}).json()["data"]
        now = datetime.now(UTC)
        for run in runs:
            if run["id"] in tried:
                _note(tried[run["id"]], run, now)
        time.sleep(_POLL_SECONDS)


def _note(tried: Tried, run: dict[str, Any], now: datetime) -> None:
    if run["status"] in ("failed", "cancelled"):
        raise SystemExit(f"{tried.kind}: {run['error_message']}")
    if tried.finished_at is None and run["finished_at"] is not None:
        tried.finished_at = datetime.fromisoformat(run["finished_at"])
        tried.seconds = (tried.finished_at - datetime.fromisoformat(run["started_at"])).total_seconds()
    reported = run["prediction"]
    is_due = tried.seen_at is None and run["status"] in ("running", "checkpointing")
    if (
        is_due
        and run["current_step"] >= tried.steps / 10
        and reported is not None
        and reported["finish_at"] is not None
    ):
        tried.at_step, tried.seen_at = run["current_step"], now
        tried.finish_at, tried.confidence = datetime.fromisoformat(reported["finish_at"]), reported["confidence"]


def _show(tried: list[Tried]) -> bool:
    print("| run | steps | took, s | asked at step | to the end: predicted, s | was, s | off by | confidence |")
    print("|---|---|---|---|---|---|---|---|")
    measured = [one for one in tried if one.seen_at is not None]
    for attempt in sorted(measured, key=lambda prediction: prediction.error):
        print(
            f"| {attempt.kind} | {attempt.steps} | {attempt.seconds:.1f} | {attempt.at_step} | "
            f"{attempt.predicted:.1f} | {attempt.took:.1f} | {attempt.error:.1%} | {attempt.confidence} |"
        )
    for what, some in (("fake", "fake"), ("really trained", "tiny")):
        errors = [one.error for one in measured if one.kind.startswith(some)]
        if errors:
            print(f"{what}: {len(errors)} runs, median off by {statistics.median(errors):.1%}")
    if len(measured) < len(tried):
        print(f"{len(tried) - len(measured)} of {len(tried)} runs were never seen at a tenth with a prediction")
    middle = statistics.median(one.error for one in measured)
    worst = max(one.error for one in measured)
    print(f"all {len(measured)} runs: median off by {middle:.1%} (promised: at most {GOAL:.0%}), at worst {worst:.1%}")
    return middle <= GOAL and len(measured) == len(tried)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description="Predicted finishes.")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the 30 runs, for a trial")
    sys.exit(0 if main(parser.parse_args().scale) else 1)

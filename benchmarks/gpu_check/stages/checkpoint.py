"""Time that training waits for checkpoints that are written in the background."""

import itertools
import statistics
from typing import Any

from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, run_job
from benchmarks.gpu_check.models import long_texts, small_model
from tests.worker.training.tiny import make_job
from worker.wire.journal import read_journal


def run(check: Check) -> None:
    hidden, every, saves = (128, 5, 2) if check.tiny else (1024, 150, 3)
    data = long_texts(check)
    # The last save, at the end of the run, is not in the background.
    spec = make_job(
        check.folder("run"), small_model(check, hidden, 4), data, data_format="text", method="full",
        max_steps=every * saves + every // 2, batch_size=4, gradient_accumulation_steps=1, max_seq_length=256,
        optim="adamw_torch", save_steps=every, logging_steps=1, save_total_limit=None, gradient_checkpointing=False,
    )  # fmt: skip
    finished = run_job(check, Job("checkpoint", spec))
    checkpoints = [record for record in finished.outcome.of("checkpoint") if record["kind"] == "periodic"]
    if not finished.completed or not checkpoints:
        check.record("stall", "failed", finished.problem[:400] or "no checkpoint was saved")
        return
    stalls, step_seconds = _stalls(read_journal(spec["journal"]), {record["step"] for record in checkpoints})
    check.record(
        "stall", stall_ms=round(1e3 * statistics.median(stalls), 1), largest_ms=round(1e3 * max(stalls), 1),
        step_ms=round(1e3 * step_seconds, 1), checkpoints=len(stalls), megabytes=round(checkpoints[0]["bytes"] / 1e6),
        write_seconds=round(statistics.median(record["seconds"] for record in checkpoints), 2),
    )  # fmt: skip


def _stalls(journal: list[dict[str, Any]], saved: set[int]) -> tuple[list[float], float]:
    """Return the additional seconds of the steps that follow a checkpoint, and the seconds of any other."""
    steps = {line["step"]: line["t"] for line in journal if line["event"] == "step"}
    seconds = {before: steps[after] - steps[before] for before, after in itertools.pairwise(sorted(steps))}
    usual = statistics.median(value for step, value in seconds.items() if step not in saved and step > 2)
    return [seconds[step] - usual for step in sorted(saved & seconds.keys())], usual

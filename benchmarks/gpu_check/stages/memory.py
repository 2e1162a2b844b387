"""A run that exceeds the GPU's real memory: it fails as `out_of_memory`, is repaired, and trains the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, Run, largest_difference, run_job
from benchmarks.gpu_check.models import long_texts, small_model
from tests.worker.training.tiny import make_job
from worker.attempts import auto_repair

CONFIG: dict[str, Any] = {
    "method": "lora", "max_steps": 4, "batch_size": 8, "gradient_accumulation_steps": 1, "max_seq_length": 256,
    "logging_steps": 1, "gradient_checkpointing": False, "lora_dropout": 0.0, "learning_rate": 1e-3,
}  # fmt: skip
HIDDEN, LAYERS = 1024, 4
ROOM = 0.75
"""Fraction of the peak without a limit that the limited run may use: enough for half of its rows at a time."""
_MOST_ATTEMPTS = 4


def run(check: Check) -> None:
    if not check.on_gpu:
        check.record("repair", "skipped", "needs a GPU")
        return
    free = run_job(check, _job(check, "free", 1, [], 0.0))
    reserved = [point["extra"].get("gpu_memory_reserved_mb", 0.0) for point in free.outcome.of("metric")]
    if not free.completed or not reserved:
        check.record("repair", "failed", f"without a limit: {free.problem}"[:400])
        return
    limit = max(reserved) * ROOM
    repairs: list[Any] = []
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        limited = run_job(check, _job(check, "limited", attempt, repairs, limit * 2**20 / check.device.memory_bytes))
        if limited.completed:
            break
        repair = auto_repair.propose_repair(limited.effective, _phase(limited), limited.error_code or "", None)
        if repair is None:
            check.record("repair", "failed", f"attempt {attempt}: {limited.problem}"[:400])
            return
        repairs.append(repair)
    difference = largest_difference(limited.losses, free.losses)
    if limited.completed and not repairs:
        check.record("repair", "skipped", f"the run fits into {limit:,.0f} MiB: {limited.in_effect}")
        return
    status = "ok" if limited.completed and difference is not None else "failed"
    check.record(
        "repair", status, "; ".join(repair.reason for repair in repairs), attempts=attempt, peak_mb=free.peak_mb,
        limit_mb=round(limit), repaired_peak_mb=limited.peak_mb, largest_difference=difference,
        in_effect=limited.in_effect,
    )  # fmt: skip


def _job(check: Check, name: str, attempt: int, repairs: list[Any], fraction: float) -> Job:
    config, changed = auto_repair.apply_repairs(CONFIG, repairs)
    model = small_model(check, HIDDEN, LAYERS)
    spec = make_job(check.folder(name), model, long_texts(check), data_format="text", attempt=attempt, **config)
    spec["user_set_fields"] = sorted({*spec["user_set_fields"], *changed})
    spec["auto_repairs"] = [repair.model_dump(mode="json") for repair in repairs]
    return Job(f"{name} {attempt}", spec, limited_memory, (fraction,))


@contextmanager
def limited_memory(fraction: float) -> Iterator[None]:
    """Let torch allocate this fraction of the GPU's memory in this process; 0: all of it."""
    if fraction:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction)
    yield


def _phase(finished: Run) -> str:
    """Return the last phase that the run reported."""
    phases = finished.outcome.of("phase")
    return phases[-1]["name"] if phases else "loading"

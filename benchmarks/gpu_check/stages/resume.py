"""Runs that are stopped and resumed, beside the same runs without a stop."""

from typing import Any

from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, largest_difference, run_jobs
from benchmarks.gpu_check.models import small_model
from tests.worker.training.tiny import make_chat_dataset, make_job, make_pairs

STEPS, STOP = 8, 4
BASE: dict[str, Any] = {
    "max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2, "max_seq_length": 128, "logging_steps": 1,
    "learning_rate": 5e-3,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora"},
    "full, packed": {"method": "full", "packing": True, "gradient_accumulation_steps": 1, "learning_rate": 1e-3},
    "dpo": {"method": "dpo"},
}


def run(check: Check) -> None:
    model = small_model(check)
    chats, pairs = make_chat_dataset(check.work / "chats.jsonl", 128), make_pairs(check.work / "pairs.jsonl", 96)

    def job(name: str, part: str, **more: Any) -> Job:
        data, format_ = (pairs, "preference") if name == "dpo" else (chats, "chat")
        folder = check.folder(f"{name}-{'whole' if part == 'whole' else 'parts'}")
        spec = make_job(folder, model, data, data_format=format_, **BASE | RUNS[name] | more)
        return Job(f"{name}, {part}", spec)

    first = run_jobs(
        check,
        [job(name, "whole") for name in RUNS] + [job(name, "stopped", stop_at_step=STOP) for name in RUNS],
        check.at_once,
    )
    whole, stopped = first[: len(RUNS)], first[len(RUNS) :]
    for name, finished in zip(RUNS, first, strict=False):
        if problem := next((part.problem for part in (finished, stopped[list(RUNS).index(name)]) if part.problem), ""):
            check.record(name, "failed", problem[:400])
    resumable = [(name, a, b) for name, a, b in zip(RUNS, whole, stopped, strict=True) if a.completed and b.completed]
    jobs = [job(name, "resumed", attempt=2, resume_from=b.outcome.checkpoint(STOP)) for name, _, b in resumable]
    for (name, a, b), resumed in zip(resumable, run_jobs(check, jobs, check.at_once), strict=True):
        if not resumed.completed:
            check.record(name, "failed", resumed.problem[:400])
            continue
        parts = [*b.losses, *resumed.losses]
        difference = largest_difference(parts, a.losses)
        check.record(
            name, "ok" if difference is not None else "failed",
            "equal to the bit" if difference == 0 else f"losses: {a.losses} without a stop, {parts} with one",
            largest_difference=difference, stopped_at=STOP, steps=len(parts), fidelity=resumed.facts.get("fidelity"),
        )  # fmt: skip

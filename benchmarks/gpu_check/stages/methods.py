"""Small runs: every method, and the ways to load, pack, recompute and export."""

from typing import Any

from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, Run, run_jobs
from benchmarks.gpu_check.models import small_model
from tests.worker.training.tiny import make_chat_dataset, make_job, make_pairs, make_prompts, make_rated

BASE: dict[str, Any] = {
    "max_steps": 4, "batch_size": 2, "gradient_accumulation_steps": 2, "max_seq_length": 128, "logging_steps": 1,
}  # fmt: skip
_LENGTH = {"type": "length", "min": 1, "max": 6, "unit": "tokens", "slack": 12}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "qlora, evaluated and saved": ("chat", {"method": "qlora", "eval_split": 0.2, "eval_steps": 2, "save_steps": 2}),
    "qlora, packed": ("chat", {"method": "qlora", "packing": True}),
    "qlora, every layer recomputed": ("chat", {"method": "qlora", "gradient_checkpointing": True}),
    "lora, merged": ("chat", {"method": "lora", "gradient_checkpointing": "selective", "output": "merged"}),
    "full": ("chat", {"method": "full", "save_steps": 2}),
    "sft, 8-bit base": ("chat", {"method": "sft", "load_in_8bit": True}),
    "dpo": ("preference", {"method": "dpo"}),
    "kto": ("rated", {"method": "kto"}),
    "orpo": ("preference", {"method": "orpo"}),
    "simpo": ("preference", {"method": "simpo"}),
    "reward": ("preference", {"method": "reward"}),
    "rlhf": ("prompt", {"method": "rlhf", "batch_size": 4, "gradient_accumulation_steps": 1,
                        "rlhf": {"num_generations": 4, "max_completion_length": 8, "rewards": [_LENGTH]}}),
    "gkd": ("chat", {"method": "gkd", "gkd": {"teacher": "teacher", "max_completion_length": 8}}),
}  # fmt: skip
"""Format of the dataset and configuration of each run."""
GPU_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full, activations offloaded": ("chat", {"method": "full", "activation_offload": True}),
    "lora, compiled": ("chat", {"method": "lora", "torch_compile": True}),
}
"""Runs of what a CPU does not have, or takes minutes for."""


def run(check: Check) -> None:
    model = small_model(check)
    data = {
        "chat": make_chat_dataset(check.work / "chats.jsonl", 64),
        "preference": make_pairs(check.work / "pairs.jsonl", 32),
        "rated": make_rated(check.work / "rated.jsonl", 32),
        "prompt": make_prompts(check.work / "prompts.jsonl", 32),
    }
    teacher = {"name": "teacher", "path": str(model), "hub": None, "revision": None}
    jobs = [
        Job(
            name,
            make_job(check.folder(name), model, data[format_], data_format=format_, **BASE | config)
            | ({"teacher": teacher} if "gkd" in config else {}),
        )
        for name, (format_, config) in (RUNS | GPU_RUNS if check.on_gpu else RUNS).items()
    ]
    for first in range(0, len(jobs), check.at_once):
        for finished in run_jobs(check, jobs[first : first + check.at_once], check.at_once):
            record(check, finished)


def record(check: Check, finished: Run) -> None:
    """Record how a run ended, and what the trainer chose."""
    check.record(
        finished.job.name, "ok" if finished.completed else "failed", finished.problem[:400],
        seconds=round(finished.ended.seconds, 1), last_loss=finished.losses[-1] if finished.losses else None,
        peak_mb=finished.peak_mb, in_effect=finished.in_effect, replaced=finished.replaced,
    )  # fmt: skip

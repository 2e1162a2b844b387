"""Losses of ten steps beside plain TRL with the same data, seed and settings."""

import json
from typing import Any

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, largest_difference, run_jobs
from benchmarks.gpu_check.models import small_model
from benchmarks.gpu_check.processes import Call
from tests.worker.training.tiny import make_chat_dataset, make_job, make_pairs

BOUND = 1e-3
"""Largest relative difference of a loss."""
BASE: dict[str, Any] = {
    "max_steps": 10, "batch_size": 4, "gradient_accumulation_steps": 2, "max_seq_length": 96, "logging_steps": 1,
    "learning_rate": 5e-3, "optim": "adamw_torch", "lora_dropout": 0.0, "save_steps": 1000,
}  # fmt: skip
"""Without dropout: the order of random draws is not part of the comparison."""
RUNS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora"},
    "lora": {"method": "lora"},
    "packed": {"method": "lora", "packing": True, "gradient_accumulation_steps": 1},
    "dpo": {"method": "dpo", "learning_rate": 1e-3},
}


def run(check: Check) -> None:
    model = small_model(check)
    chats, pairs = make_chat_dataset(check.work / "chats.jsonl", 64), make_pairs(check.work / "pairs.jsonl", 96)
    computed = {} if check.on_gpu else {"dtype": "bfloat16"}  # as on a GPU
    jobs = []
    for name, config in RUNS.items():
        data, format_ = (pairs, "preference") if name == "dpo" else (chats, "chat")
        jobs.append(
            Job(name, make_job(check.folder(name), model, data, data_format=format_, **BASE | computed | config))
        )
    ours = run_jobs(check, jobs, check.at_once)
    calls = []
    for finished in ours:
        folder = check.folder(f"{finished.job.name} trl")
        data = finished.job.spec["dataset"]["path"]
        calls.append(Call(_plain_losses, folder, (str(model), data, finished.effective, str(folder))))
    ends = processes.run_all(calls, check.at_once)
    for finished, call, end in zip(ours, calls, ends, strict=True):
        name = finished.job.name
        if not finished.completed:
            check.record(name, "failed", f"Anneal: {finished.problem}"[:400])
            continue
        if end.code != 0:
            check.record(name, "failed", f"TRL: {(call.folder / 'stderr').read_text()[-400:]}")
            continue
        theirs = json.loads((call.folder / "result.json").read_text())
        difference = largest_difference(finished.losses, theirs)
        equal = difference is not None and difference <= BOUND
        check.record(
            name, "ok" if equal else "failed", "" if equal else f"losses differ: {finished.losses} and {theirs}",
            largest_difference=difference, first_loss=finished.losses[0], last_loss=finished.losses[-1],
            steps=len(finished.losses), in_effect=finished.in_effect,
            dtype=finished.effective.get("dtype"), weights=finished.facts.get("weights_dtype"),
        )  # fmt: skip


def _plain_losses(*arguments: Any) -> None:
    from benchmarks.gpu_check import plain_trl  # imports torch, which this process must not

    plain_trl.losses(*arguments)

"""Kinds of runs that clients create; all are deterministic, so every loss can be checked."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Request body parameters of a profile, and its frequency."""

    name: str
    steps: int
    extra: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    backend: str = "fake"
    max_restarts: int = 20
    """High, because with a fault every few seconds a run may be lost often."""
    resources: dict[str, Any] = field(default_factory=dict)
    must_fail_with: str | None = None
    weight: int = 1
    """Relative frequency among the clients' runs; 0 if only faults create it."""


_ON_TWO_DEVICES: dict[str, Any] = {
    "base_model": "tiny", "learning_rate": 1e-2, "batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 24,
    "save_steps": 4, "logging_steps": 1, "max_seq_length": 64, "packing": False,
}  # fmt: skip

PLANS = {
    plan.name: plan
    for plan in (
        Plan("plain", 40, {"step_seconds": 0.04}, {"save_steps": 10}, weight=6),
        Plan("long", 120, {"step_seconds": 0.04}, {"save_steps": 20, "eval_steps": 30, "eval_split": 0.2}, weight=4),
        Plan(
            "saver",
            30,
            {"step_seconds": 0.03, "save_seconds": 0.25, "checkpoint_bytes": 200_000},
            {"save_steps": 5, "save_total_limit": 2},
            weight=4,
        ),
        Plan("chatty", 25, {"step_seconds": 0.05, "log_lines_per_step": 60}, {"save_steps": 10}, weight=2),
        Plan("loader", 10, {"step_seconds": 0.03, "load_seconds": 0.8}, {"save_steps": 5}, weight=2),
        # Out of memory at first, then a non-finite step: it is retried automatically twice.
        Plan(
            "mended",
            24,
            {"step_seconds": 0.03, "out_of_memory_above": 2, "non_finite_at_step": 9},
            {"save_steps": 6, "batch_size": 4, "on_non_finite": "rewind"},
            weight=2,
        ),
        Plan("crasher", 20, {"crash_at_step": 7, "crash": "segv"}, must_fail_with="trainer_crashed", weight=1),
        Plan("broken", 20, {"non_finite_at_step": 5}, must_fail_with="non_finite_loss", weight=1),
        Plan(
            "qlora",
            24,
            config={
                "base_model": "tiny",
                "method": "qlora",
                "lora_r": 4,
                "lora_dropout": 0.1,
                "learning_rate": 1e-2,
                "batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_steps": 24,
                "save_steps": 4,
                "logging_steps": 1,
                "max_seq_length": 64,
                "packing": True,
            },
            backend="celery",
            weight=0,
        ),
        Plan(
            "gang",
            24,
            config={**_ON_TWO_DEVICES, "method": "lora", "lora_r": 4, "lora_dropout": 0.1},
            backend="celery",
            resources={"devices": 2},
            weight=0,
        ),
        Plan(
            "divided",
            24,
            config={**_ON_TWO_DEVICES, "method": "full", "optim": "adamw_torch"},
            backend="celery",
            resources={"devices": 2, "sharding": "full"},
            weight=0,
        ),
        Plan(
            "hosts",
            120,
            config={
                **_ON_TWO_DEVICES,
                "method": "lora",
                "lora_r": 4,
                "lora_dropout": 0.1,
                "max_steps": 120,
                "save_steps": 10,
            },
            backend="celery",
            resources={"devices": 2, "hosts": 2},
            weight=0,
        ),
        Plan("fragile", 400, {"step_seconds": 0.05}, {"save_steps": 1000}, max_restarts=0, weight=0),
        Plan(
            "hanger", 20, {"hang_at_step": 5}, {"save_steps": 4}, max_restarts=0, must_fail_with="worker_lost", weight=0
        ),
    )
}


def wanted_in(number: int) -> str | None:
    """Return the kind of training run that is created in a round, beside those of the clients."""
    if number % 20 == 1:
        return "qlora"
    if number % 20 == 15:
        return "hosts"
    return {8: "gang", 0: "divided"}.get(number % 10)


def body(plan: Plan, datasets: dict[str, str], priority: int = 0) -> dict[str, Any]:
    """Return the body of `POST /v1/runs`."""
    extra = {"extra": {"steps": plan.steps, "log_lines_per_step": 1, **plan.extra}} if plan.backend == "fake" else {}
    config = {"base_model": "any", "method": "sft", "logging_steps": 1, **extra, **plan.config}
    return {
        "backend": plan.backend,
        "dataset_id": datasets[plan.backend],
        "config": config,
        "priority": priority,
        "max_restarts": plan.max_restarts,
        "name": plan.name,
        "resources": plan.resources,
    }

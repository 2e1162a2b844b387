"""Runs of the training process, as a worker starts it, and what their records say about speed and memory."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator import architecture
from app.estimator.activations import LIGER_PACKAGE, Precision
from app.estimator.memory import estimate_memory
from app.estimator.steps import attention_of, micro_batch
from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.processes import Call, Ended
from tests.worker.training.tiny import Outcome, parse_records, write_job
from worker.wire.journal import read_journal

Wrapper = Callable[..., AbstractContextManager[Any]]
"""Context in which the training process runs; defined in a module."""


@dataclass(frozen=True)
class Job:
    """Job to run: the file that a supervisor writes, and the context of its process."""

    name: str
    spec: dict[str, Any]
    wrapper: Wrapper = nullcontext
    wrapper_arguments: tuple[Any, ...] = ()
    seconds: float = 120.0


@dataclass
class Run:
    """Job that has ended."""

    job: Job
    ended: Ended
    outcome: Outcome

    @property
    def result(self) -> dict[str, Any]:
        """Result record; empty if the process sent none."""
        records = self.outcome.of("result")
        return records[-1] if records else {}

    @property
    def completed(self) -> bool:
        """True if the run reached its end, or the step at which it was to stop."""
        return self.ended.code == 0 and self.result.get("outcome") in ("completed", "stopped")

    @property
    def problem(self) -> str:
        """Reason why the run did not complete; empty if it did."""
        if self.completed:
            return ""
        if self.ended.code is None:
            return f"no end within {self.job.seconds:.0f} s"
        error = self.result.get("error") or {}
        last_lines = " ".join(self.outcome.stderr.split()[-40:])
        return error.get("message") or f"exit code {self.ended.code}: {last_lines}"

    @property
    def error_code(self) -> str | None:
        """Stable code of the failure."""
        return (self.result.get("error") or {}).get("code")

    @property
    def effective(self) -> dict[str, Any]:
        """Configuration in effect, from the run's records."""
        records = self.outcome.of("config")
        return records[-1]["effective"] if records else {}

    @property
    def facts(self) -> dict[str, Any]:
        """Run info, from the run's records."""
        return {name: value for record in self.outcome.of("config") for name, value in record["facts"].items()}

    @property
    def replaced(self) -> dict[str, str]:
        """Defaults that were replaced: value in use and reason, by field."""
        records = self.outcome.of("config")
        return {
            item["field"]: f"{item['used']} ({item['reason']})" for item in (records[-1:] and records[-1]["replaced"])
        }

    @property
    def losses(self) -> list[float]:
        """Exact loss of each step of this attempt."""
        return [float.fromhex(loss) for loss, _ in self.outcome.steps.values()]

    def speed(self, warm_up: int) -> dict[str, float]:
        """Return tokens per second, without padding, and seconds of a step, after `warm_up` steps.

        The time is that from the end of a step to the end of the next, with all that happens between them.
        """
        tokens = {point["step"]: point["extra"]["tokens"] for point in self.outcome.of("metric")}
        journal = read_journal(self.job.spec["journal"])
        ends = {line["step"]: line["t"] for line in journal if line["event"] == "step"}
        last = max(ends, default=0)
        if last <= warm_up or not {warm_up, last} <= tokens.keys():
            return {}
        steps = [ends[step + 1] - ends[step] for step in range(warm_up, last)]
        speed = (tokens[last] - tokens[warm_up]) / (ends[last] - ends[warm_up])
        return {"tokens_per_second": round(speed, 1), "step_seconds": round(statistics.median(steps), 4)}

    @property
    def peak_mb(self) -> float | None:
        """Peak memory in MiB: of tensors on a GPU, after the first step; of the process on a CPU."""
        points = self.outcome.of("metric")
        peaks = [point["gpu_memory_mb"] or point["extra"].get("host_memory_peak_mb") for point in points]
        return max(peaks[1:] or peaks, default=None)

    @property
    def recomputed_part(self) -> float:
        """Part of the layers that the backward pass recomputes."""
        plan = self.facts.get("step_plan")
        if plan is not None:
            return float(plan["recomputed_layers"] / plan["layers"])
        return {True: 1.0, "selective": 0.5}.get(self.effective.get("gradient_checkpointing"), 0.0)

    @property
    def in_effect(self) -> str:
        """Choices of the trainer on one line: micro-batches, recomputation, attention, other kernels."""
        config = self.effective
        chosen = (
            f"{config.get('batch_size')} × {config.get('gradient_accumulation_steps')}",
            f"recomputes {self.recomputed_part:.0%}",
            str(self.facts.get("attention")),
            *(f"{part}: {kernel}" for part, kernel in self.facts.get("kernels", {}).items()),
        )
        return ", ".join(chosen)


def run_jobs(check: Check, jobs: Sequence[Job], at_once: int = 1) -> list[Run]:
    """Run jobs in new processes; return them in order."""
    calls = [_call(check, job) for job in jobs]
    ends = processes.run_all(calls, at_once)
    return [_read(job, call, end) for job, call, end in zip(jobs, calls, ends, strict=True)]


def run_job(check: Check, job: Job) -> Run:
    """Run one job in a new process."""
    return run_jobs(check, [job])[0]


def _call(check: Check, job: Job) -> Call:
    job.spec["device"] = check.job_device
    folder = Path(job.spec["attempt_dir"])
    return Call(_train, folder, (str(write_job(job.spec)), job.wrapper, job.wrapper_arguments), job.seconds)


def _train(path: str, wrapper: Wrapper, arguments: Iterable[Any]) -> int:
    from worker.training.__main__ import main

    with wrapper(*arguments):
        return main([path])


def _read(job: Job, call: Call, ended: Ended) -> Run:
    stdout, stderr = ((call.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Run(job, ended, Outcome(-1 if ended.code is None else ended.code, parse_records(stdout), job.spec, stderr))


def estimated_peak_mb(run: Run, length: int) -> float:
    """Return the estimate of the memory that `Run.peak_mb` measures, for the configuration and the layers in effect.

    `length`: tokens of the longest sequence.
    """
    config = TrainingConfig.model_validate(run.effective)
    described = json.loads((Path(run.job.spec["base_model"]["path"]) / "config.json").read_text())
    model, kind = architecture.read_architecture(described), run.job.spec["device"]["kind"]
    batch = micro_batch(model, config, length, run.facts.get("sequences"))
    has_liger = run.facts.get("kernels", {}).get("norms", "").startswith(LIGER_PACKAGE)
    precision, recomputed = (
        Precision.for_device(config, kind, has_liger=has_liger),
        round(run.recomputed_part * model.layers),
    )
    estimate = estimate_memory(model, config, precision, batch, recomputed, attention_of(model, config))
    return round((estimate.tensors if kind == "cuda" else estimate.peak) / 2**20, 1)


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the largest relative difference; None if the numbers of steps differ or are 0."""
    if len(losses) != len(others) or not losses:
        return None
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, others, strict=True))

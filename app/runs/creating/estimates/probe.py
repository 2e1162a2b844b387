"""Probes: short runs that measure the resources of a run instead of estimating them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.attempt.run_facts import RunFacts, read_facts
from anneal.contracts.methods import method_of
from anneal.contracts.schemas.estimates import KeptEstimate, Measured, ProbeResult
from anneal.contracts.schemas.runs.reads import TrainingMetrics
from anneal.contracts.schemas.runs.requests import MOST_TAGS, RunCreate, RunToEstimate
from anneal.contracts.training_config.field_traits import NOT_IN_PROBE
from anneal.contracts.training_config.raw_config import PROBE_STEPS, is_probe, normalize_numbers
from app.tables.runs import Attempt, Run

TAG = "probe"
_MOST_STEP_SECONDS = 1e7


def probe_request(request: RunToEstimate) -> RunCreate:
    """Build the probe for a requested run; `request` has passed validation."""
    config = {name: value for name, value in request.config.items() if name not in NOT_IN_PROBE}
    extra = {
        name: value
        for name, value in (request.config.get("extra") or {}).items()
        if f"extra.{name}" not in NOT_IN_PROBE
    }
    name = request.name or f"{method_of(config).name} of {config['base_model']}"
    return RunCreate(
        experiment_id=request.experiment_id,
        name=f"probe of {name}"[:200],
        backend=request.backend,
        dataset_id=request.uploaded_dataset,
        config=normalize_numbers(config) | {"on_out_of_memory": "stop", "extra": {**extra, "probe": True}},
        priority=request.priority,
        max_restarts=request.max_restarts,
        resources=request.resources,
        tags=[*[tag for tag in request.tags if tag != TAG][: MOST_TAGS - 1], TAG],
    )


def seconds_of_step(points: Sequence[TrainingMetrics]) -> float | None:
    """Return seconds per step between the two newest metrics, including the wait for data."""
    if len(points) < 2:
        return None
    steps, extra = points[-1].step - points[-2].step, points[-1].extra
    parts = [extra.get(name) for name in ("step_seconds", "data_seconds")]
    if steps < 1 or not isinstance(parts[0], int | float):
        return None
    seconds = sum(part for part in parts if isinstance(part, int | float)) / steps
    return round(seconds, 6) if 0 <= seconds <= _MOST_STEP_SECONDS else None  # a trainer may report any number


async def probe_result(
    session: AsyncSession,
    run: Run,
    estimate: KeptEstimate | None,
    measured: Measured | None,
    facts: Mapping[str, Any],
) -> ProbeResult | None:
    """Return a probe's projection of the whole run that `estimate` describes; None if the run is not a probe."""
    if not is_probe(run.config):
        return None
    query = select(Attempt.report).where(Attempt.run_id == run.id, Attempt.attempt == run.attempt)
    stored = await session.scalar(query) if run.status == "failed" else None
    report = FailureReport.model_validate(stored or {})
    return _probe_result(run, estimate, measured, read_facts(facts), report)


def _probe_result(
    run: Run, estimate: KeptEstimate | None, measured: Measured | None, facts: RunFacts, report: FailureReport
) -> ProbeResult:
    device = facts.device_name or facts.device
    steps = _whole_run_steps(run.config, estimate, facts.whole_run_steps)
    if run.status == "failed" and run.error_code == "out_of_memory":
        return _out_of_memory(run, steps, facts, report)
    if run.status in ("failed", "cancelled"):
        why = run.error_message or "it was stopped."
        return _unknown_result(steps, f"The probe ended ({run.status}) before it measured anything: {why}")
    each = measured.step_seconds if measured else None
    if run.status != "completed":
        return _unknown_result(steps, "The probe has not ended yet.")
    if measured is None or each is None:
        return _unknown_result(steps, "The probe has ended without reporting a step time.")
    most = None if steps is None else steps * each
    seconds = most
    if most is not None and estimate and estimate.tokens and measured.tokens_per_second:
        seconds = min(most, estimate.tokens / measured.tokens_per_second)
    peak = "" if measured.peak_memory_mb is None else f" with {measured.peak_memory_mb:,.0f} MiB at the peak"
    return ProbeResult(
        fits=True,
        steps=steps,
        seconds=None if seconds is None else round(seconds, 1),
        seconds_at_most=None if most is None else round(most, 1),
        message=f"The run fits on {device or 'this device'}: {PROBE_STEPS} steps on its longest rows completed"
        f"{peak}; the second step took {each:.3g} s.",
    )


def _out_of_memory(run: Run, steps: int | None, facts: RunFacts, report: FailureReport) -> ProbeResult:
    """Return the result of a probe that ran out of memory; `report` is the attempt's failure report.

    Running out of host memory says nothing about a GPU, so `fits` is null then.
    """
    why, phase, device = run.error_message or "", report.phase, facts.device
    # Tokenization always uses host memory.
    on_host = report.killed_by_kernel or phase == "tokenizing"
    if on_host and device != "cpu":
        during = f" during {phase}" if phase else ""
        sentence = f"The host ran out of memory{during}, so nothing was measured about the device."
        return _unknown_result(steps, f"{sentence} {why}".strip())
    name = facts.device_name or device
    where = f" on {name}" if name else ""
    what = "its longest rows" if phase == "training" else "it"
    during = f" during {phase}" if phase and phase != "training" else ""
    sentence = f"The run does not fit{where}: {what} ran out of memory{during}."
    return _unknown_result(steps, f"{sentence} {why}".strip(), fits=False)


def _whole_run_steps(config: Mapping[str, Any], estimate: KeptEstimate | None, counted: int | None) -> int | None:
    """Return the steps of the whole run.

    The trainer's count includes packing and dropped rows, but not the settings that a probe omits.
    """
    is_open = config.get("max_steps") is None
    is_rough = is_open and (config.get("packing") or method_of(config).generates)
    expected = estimate.steps if estimate else None
    if counted is None or not (is_rough or expected is None):
        return expected
    if estimate is None:
        return counted
    if is_open:
        counted = max(math.ceil(counted * (1 - estimate.eval_split)), int(config.get("min_steps") or 1))
    return min(counted, estimate.stop_at_step or counted)


def _unknown_result(steps: int | None, message: str, fits: bool | None = None) -> ProbeResult:
    return ProbeResult(fits=fits, steps=steps, seconds=None, seconds_at_most=None, message=message)

"""Serializers of runs: the responses of the run endpoints and of the backends, from rows of `runs`.

Fields are columns of the same name, but for those of `_derived_fields`: paths are absolute, in the service's storage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.methods import to_score
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.reads import Prediction, RunRead, RunStopped, StopOutlook
from app.infra.storage import Storage
from app.runs.creating.estimates import probe
from app.runs.creating.estimates.store import estimate_and_measurements
from app.runs.reading.metrics.outlines import Outline
from app.runs.reading.metrics.points import newest_evaluation, read_recent
from app.runs.state import service
from app.runs.state.checkpoints.service import preferred_checkpoint
from app.tables.runs import Run

SUMMARY = (
    "experiment_id", "name", "tags", "task", "method", "base_model", "backend", "dataset_id", "eval_dataset_id",
    "status", "priority", "pinned", "parent_run_id", "base_run_id", "attempt", "worker_id", "current_step",
    "total_steps", "current_epoch", "best_loss", "pending_reason", "stop_mode", "end_reason", "error_code",
    "error_message", "created_by", "created_at", "started_at", "finished_at", "stop_requested_at",
)  # fmt: skip
"""Columns of every run in a list."""
FULL = ("config", "effective_config", "resources", "requirements", "max_restarts", "resume_checkpoint_id")
"""Further columns of a run with its configuration."""
_HISTORY = 100


async def run_read(session: AsyncSession, storage: Storage, run: Run, prediction: Prediction | None = None) -> RunRead:
    """Return a run with its estimate and its newest 100 points of metrics, as all endpoints of one run answer.

    `prediction` says when the run starts and finishes; None where it is not asked for.
    """
    return RunRead(**await _run_fields(session, storage, run), prediction=prediction)


async def run_stopped(session: AsyncSession, storage: Storage, run: Run, outlook: StopOutlook) -> RunStopped:
    """Return a run as `run_read` does, with the expected result of its stop; for the endpoint that stops runs."""
    return RunStopped(**await _run_fields(session, storage, run), stop=outlook)


async def _run_fields(session: AsyncSession, storage: Storage, run: Run) -> dict[str, Any]:
    history = await read_recent(session, run.id, _HISTORY) if run.attempt else []
    same = {name: getattr(run, name) for name in (*SUMMARY, *FULL)}
    # A run that was never claimed has neither checkpoints nor metrics, so its creation does not wait for them.
    saved = await preferred_checkpoint(session, run) if run.attempt else None
    derived = _derived_fields(storage, run) | _derived_full(
        storage, run, [saved.step, saved.attempt] if saved else None
    )
    derived |= {"id": run.id, "last_seq": run.event_seq}
    reward_runs = await service.reward_run_ids(session, run)
    expected, real = await estimate_and_measurements(session, run, probe.seconds_of_step(history))
    facts, replaced = await service.run_facts(session, run)
    result = await probe.probe_result(session, run, expected, real, facts or {})
    taken: dict[str, Any] = {
        "facts": facts,
        "replaced": replaced,
        "warnings": _current_warnings(run),
        "estimate": expected,
        "measured": real,
        "probe": result,
        "reward_run_ids": list(reward_runs),
        "extra_eval_datasets": await service.extra_eval_datasets(session, run),
    }
    best_eval = None if run.best_score is None else to_score(run.config, run.best_score)
    evaluation = await newest_evaluation(session, run.id) if RunTask(run.task).is_inference else None
    taken |= {"best_eval": best_eval, "evaluation": evaluation, "metrics_history": history}
    return {**same, **derived, **taken}


def _current_warnings(run: Run) -> list[dict[str, str]]:
    """Return the warnings of the validation; those about workers and devices only until the run starts."""
    return [warning for warning in run.warnings if not run.attempt or warning["field"].startswith("config")]


def run_page(
    storage: Storage, rows: Sequence[Any], has_more: bool, predictions: Mapping[str, Prediction | None], *, full: bool
) -> bytes:
    """Return a page of `RunSummary`, or of `RunFull`, as JSON, from the rows of `app.runs.reading.queries`.

    PostgreSQL has written most of each item (`item_json`), so no model is built for it. `predictions` are
    by run id.
    """
    items = []
    for row in rows:
        prediction = predictions.get(row.id)
        more = _derived_fields(storage, row)
        more["prediction"] = prediction.model_dump(mode="json") if prediction else None
        if full:
            more |= _derived_full(storage, row, row.furthest)
        items.append(f"{row.item_json[:-1]},{to_json(more).decode()[1:]}")
    return f'{{"data":[{",".join(items)}],"has_more":{"true" if has_more else "false"}}}'.encode()


def row_page(
    rows: Sequence[Any],
    has_more: bool,
    predictions: Mapping[str, Prediction | None],
    outlines: Mapping[str, Outline],
) -> bytes:
    """Return a page of `RunRow` as JSON, from rows of `app.runs.reading.queries`; unknown values are absent."""
    items = []
    for row in rows:
        prediction, outline = predictions.get(row.id), outlines.get(row.id)
        more: dict[str, Any] = {}
        if prediction is not None:
            start = prediction.start_at if row.status == "pending" else None
            known = {"starts_at": start, "finishes_at": prediction.finish_at}
            more |= {name: at.strftime("%Y-%m-%dT%H:%M:%SZ") for name, at in known.items() if at is not None}
        if outline is not None:
            more |= {"rewards" if outline.is_of_rewards else "losses": outline.values}
            if outline.tokens_per_second is not None:
                more["tokens_per_second"] = outline.tokens_per_second
        items.append(f"{row.item_json[:-1]},{to_json(more).decode()[1:]}" if more else row.item_json)
    return f'{{"data":[{",".join(items)}],"has_more":{"true" if has_more else "false"}}}'.encode()


def _derived_fields(storage: Storage, run: Any) -> dict[str, Any]:
    """Return fields of every run in a list that are not columns of the same name."""
    output = None if run.output_attempt is None else storage.shown_path(run.id, run.output_attempt, "output")
    return {"fine_tuned_model": output}


def _derived_full(storage: Storage, run: Any, furthest: list[int] | None) -> dict[str, Any]:
    """Return those of a run with its configuration; `furthest` is step and attempt of the newest good checkpoint."""
    checkpoint = storage.shown_path(run.id, furthest[1], f"checkpoint-{furthest[0]}") if furthest else None
    return {"run_id": run.id, "checkpoint_path": checkpoint}

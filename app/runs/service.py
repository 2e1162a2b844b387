"""Operations on runs. `lifecycle` writes statuses; resuming is in `resume.py`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert as sql_insert
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.backends.base import Rules
from app.config import Settings
from app.errors import ApiError, FieldError, conflict, invalid, not_found
from app.experiments.service import default as default_experiment
from app.ids import is_id, new_id
from app.runs import lifecycle
from app.runs.checks import Examined, examine, refusal, requirements
from app.runs.config import TrainingMethod
from app.runs.models import Run, RunRewardModel
from app.runs.schemas import RunCheck, RunCreate, RunEdit, StopMode
from app.storage import Storage


@dataclass(frozen=True)
class Idempotency:
    """Idempotency key of a request, with a digest of the request."""

    key: str
    digest: str

    @classmethod
    def of(cls, key: str | None, call: str, body: bytes) -> "Idempotency | None":
        """Create it from the `Idempotency-Key` header, the call's path and the raw body; None without a header."""
        if key is None:
            return None
        if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
            message = "must be 1 to 255 printable ASCII characters"
            raise invalid([FieldError(field="Idempotency-Key", code="invalid", message=message)])
        return cls(key, hashlib.sha256(call.encode() + b"\0" + body).hexdigest())


@dataclass(frozen=True)
class Surroundings:
    """Context of decisions about a run, apart from the database."""

    settings: Settings
    storage: Storage
    rules: Mapping[str, Rules]
    """Rules of every backend, by name."""


async def create(
    session: AsyncSession,
    around: Surroundings,
    request: RunCreate,
    created_by: str | None,
    idempotency: Idempotency | None = None,
    run_id: str | None = None,
) -> Run:
    """Create a run, or raise 422 with all errors; the same idempotency key returns the same run."""
    if earlier := await replayed(session, created_by, idempotency):
        return earlier
    found = await examine(session, around.settings, around.storage, around.rules, request)
    if found.errors or found.config is None:
        raise refusal(found.errors)
    if request.experiment_id is None:
        experiment_id = (await default_experiment(session, created_by)).id
    else:
        experiment_id = request.experiment_id
    values = {
        "id": run_id or new_id("run"),
        "experiment_id": experiment_id,
        "name": request.name or f"{found.config.method} of {found.config.base_model}",
        "tags": request.tags,
        "backend": request.backend,
        "dataset_id": request.dataset_id,
        "eval_dataset_id": request.eval_dataset_id,
        "config": found.config.model_dump(mode="json"),
        "given": found.given,
        "base_run_id": found.base_run_id,
        "requirements": requirements(around.rules[request.backend], found.config, found.given),
        "priority": request.priority,
        "max_restarts": request.max_restarts,
    }
    return await insert(session, values, created_by, idempotency, reward_run_ids=found.reward_run_ids)


async def check(session: AsyncSession, around: Surroundings, request: RunCreate) -> RunCheck:
    """Validate a request as `create` does, without creating anything."""
    found: Examined = await examine(session, around.settings, around.storage, around.rules, request)
    return RunCheck(
        valid=not found.errors,
        errors=found.errors,
        warnings=found.warnings,
        effective_config=found.effective.model_dump(mode="json") if found.effective else None,
    )


async def replayed(session: AsyncSession, created_by: str | None, idempotency: Idempotency | None) -> Run | None:
    """Return the run that an earlier request with this key created; raise 422 if that request was different."""
    if idempotency is None:
        return None
    query = select(Run).where(Run.created_by == created_by, Run.idempotency_key == idempotency.key)
    run = await session.scalar(query)
    if run is not None and run.request_digest != idempotency.digest:
        raise key_reused(run.id)
    return run


def key_reused(made: str) -> ApiError:
    """Build a 422 for an idempotency key that was used before with a different request."""
    return ApiError(
        422,
        "idempotency_key_reused",
        f"This Idempotency-Key was used before with a different request, which created {made}; use a new key.",
    )


async def insert(
    session: AsyncSession,
    values: dict[str, Any],
    created_by: str | None,
    idempotency: Idempotency | None,
    reason: str = "created",
    reward_run_ids: Sequence[str] = (),
) -> Run:
    """Insert a run and its first event, or return the one that a duplicate of this request has just created.

    `reward_run_ids` are other runs whose outputs are its reward models; the caller has locked them.
    """
    values = {
        **values,
        "created_by": created_by,
        "idempotency_key": idempotency.key if idempotency else None,
        "request_digest": idempotency.digest if idempotency else None,
    }
    made = (await session.execute(lifecycle.create(values, reason))).mappings().one_or_none()
    if made is not None:
        if reward_run_ids:
            uses = [{"run_id": made["id"], "reward_run_id": reward_run_id} for reward_run_id in reward_run_ids]
            await session.execute(sql_insert(RunRewardModel), uses)
        return Run(**made)
    # A duplicate of this request came first and has committed: the insert waited for that.
    return await replayed(session, created_by, idempotency) or await get(session, values["id"])


async def get(session: AsyncSession, run_id: str) -> Run:
    """Return the run; raise `run_not_found` if there is none."""
    run = await session.get(Run, run_id) if is_id(run_id, "run") else None
    if run is None:
        raise not_found("run", run_id)
    return run


async def reward_run_ids(session: AsyncSession, run: Run) -> Sequence[str]:
    """Return other runs whose outputs are reward models of the run, oldest first."""
    if run.config.get("method") != TrainingMethod.rlhf:
        return []
    query = select(RunRewardModel.reward_run_id).where(RunRewardModel.run_id == run.id)
    return (await session.scalars(query.order_by(RunRewardModel.reward_run_id))).all()


async def edit(session: AsyncSession, run_id: str, body: RunEdit) -> Run:
    """Change the name, tags or pin of a run; fields that were not given stay unchanged."""
    run = await locked(session, run_id)
    for name, value in body.model_dump(exclude_none=True).items():
        setattr(run, name, value)
    await session.flush()
    return run


async def locked(session: AsyncSession, run_id: str, *, for_child: bool = False) -> Run:
    """Return the run, locked until the commit; `for_child`: it may change, but not be deleted."""
    query = select(Run).where(Run.id == run_id).execution_options(populate_existing=True)
    run = await session.scalar(query.with_for_update(read=for_child, key_share=for_child))
    if run is None:
        raise not_found("run", run_id)
    return run


async def stop(session: AsyncSession, run_id: str, mode: StopMode = "checkpoint") -> Run:
    """Request a stop; no error if a stop has ended the run, 409 if it ended by itself.

    Mode `best` requires that a best checkpoint exists.
    """
    asked = (
        lifecycle.request_stop_at_epoch_end(run_id)
        if mode == "epoch_end"
        else lifecycle.request_stop(run_id, mode == "checkpoint", mode)
    )
    moved = (await session.execute(asked)).mappings().one_or_none()
    run = await get(session, run_id)
    if moved is None and run.status != "cancelled":
        raise conflict(
            "run_has_ended", f"Run {run_id} is {run.status}: it has ended by itself and can no longer be stopped."
        )
    return run

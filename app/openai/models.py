"""`/openai/v1/models`: base models, the outputs of runs and checkpoints, by the names that jobs take."""

from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from sqlalchemy import Select, select

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.openai.lists import ListPage
from anneal.contracts.schemas.openai.models import ModelObject
from app.api.dependencies import CurrentSettings, CurrentStorage, Reading
from app.api.errors import ApiError
from app.base_models import resolver
from app.config import Settings
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.models.catalog import list_models
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run

router = APIRouter(prefix="/models")

_MOST_OUTPUTS = 1000
_WITH_MODELS = [name for name, rules in BACKEND_RULES.items() if rules.loads_model]


@router.get("")
async def list_usable_models(
    session: Reading, settings: CurrentSettings, storage: CurrentStorage
) -> ListPage[ModelObject]:
    """List the base models below the models roots by name, then the newest 1,000 runs that have an output.

    Models of the hub and checkpoints are not listed.
    """
    # Before the query: no connection waits for the folders, which may be on a share.
    bases = await storage.in_thread(_list_bases, settings, storage)
    outputs = (await session.execute(_select_outputs().order_by(Run.id.desc()).limit(_MOST_OUTPUTS))).all()
    return ListPage[ModelObject].from_items([*bases, *map(_trained_model, outputs)])


@router.get("/{model:path}", responses={404: {"description": "There is no such model."}})
async def get_model(model: str, session: Reading, settings: CurrentSettings, storage: CurrentStorage) -> ModelObject:
    """Get a base model, the output of a run or a checkpoint by its name."""
    if resolver.is_run(model) or is_id(model, "ckpt"):
        query = _select_checkpoints() if is_id(model, "ckpt") else _select_outputs()
        row = (await session.execute(query.where(query.selected_columns.id == model))).one_or_none()
        if row is None:
            raise _model_not_found(f"{model} is not a run with an output, or a checkpoint with files.")
        return _trained_model(row)
    try:
        await storage.in_thread(resolver.locate_model, settings, storage, model, None)
    except resolver.BaseModelError as error:
        raise _model_not_found(error.message) from None
    return await storage.in_thread(_base_model, settings, model)


def _select_outputs() -> Select[*tuple[Any, ...]]:
    """Select the runs whose outputs are models."""
    tasks = [RunTask.train, RunTask.export]
    is_model = (Run.output_attempt.is_not(None), Run.task.in_(tasks), Run.backend.in_(_WITH_MODELS))
    return select(Run.id, Run.created_at, Run.created_by).where(*is_model)


def _select_checkpoints() -> Select[*tuple[Any, ...]]:
    """Select the checkpoints that can be used."""
    query = select(Checkpoint.id, Checkpoint.created_at, Run.created_by).join(Run, Run.id == Checkpoint.run_id)
    is_model = (Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None), Run.backend.in_(_WITH_MODELS))
    return query.where(*is_model)


def _list_bases(settings: Settings, storage: Storage) -> list[ModelObject]:
    return [_base_model(settings, model.id) for model in list_models(settings, storage)]


def _base_model(settings: Settings, name: str) -> ModelObject:
    created = 0.0
    with suppress(resolver.BaseModelError, OSError):  # a model of the hub has no folder here
        created = resolver.folder_of(settings, name).stat().st_mtime
    return ModelObject(id=name, created=int(created), owned_by="system")


def _trained_model(row: Any) -> ModelObject:
    return ModelObject(id=row.id, created=int(row.created_at.timestamp()), owned_by=row.created_by or "system")


def _model_not_found(why: str) -> ApiError:
    listing = "`GET /openai/v1/models` lists the models of this server."
    return ApiError(404, "model_not_found", f"{why.rstrip('.')}. {listing}")

"""Validation of `resources.sequence_parallel`: what can be divided, and by which numbers."""

from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.sequence_parallel import division_obstacle, sequence_parallel_obstacles
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates.service import architecture_of

_FIELD = "resources.sequence_parallel"


async def sequence_parallel_problems(
    session: AsyncSession, settings: Settings, storage: Storage, config: TrainingConfig, resources: Resources
) -> list[FieldError]:
    """Return the reasons why the sequences of a run cannot be divided among its devices as requested.

    The number of attention heads may not be known here, such as that of a model on the hub; then the trainer checks it.
    """
    if resources.sequence_parallel == 1:
        return []
    problems = [
        FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}")
        for why in sequence_parallel_obstacles(config)
    ]
    model = await architecture_of(session, settings, storage, config)
    heads = None if model is None else model.heads
    if (obstacle := division_obstacle(resources.sequence_parallel, resources.devices, heads)) is not None:
        message = f"is {resources.sequence_parallel}, which {obstacle}"
        problems.append(FieldError(field=_FIELD, code="does_not_divide", message=message))
    return problems

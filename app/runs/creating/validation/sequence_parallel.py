"""Validation of `resources.sequence_parallel`: what can be divided, and by which numbers."""

from collections.abc import Iterator

from anneal.contracts.errors import FieldError
from anneal.contracts.training_config.sequence_parallel import division_obstacle, sequence_parallel_obstacles
from app.estimator.architecture import Architecture
from app.runs.creating.plan import RunPlan

_FIELD = "resources.sequence_parallel"


def sequence_parallel_problems(plan: RunPlan, model: Architecture | None) -> Iterator[FieldError]:
    """Yield the reasons why the sequences of a run cannot be divided among its devices as requested.

    The number of attention heads may not be known here, such as that of a model on the hub; then the trainer checks it.
    """
    requested = plan.resources.sequence_parallel
    if requested > 1:
        for why in sequence_parallel_obstacles(plan.config):
            yield FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}")
        heads = None if model is None else model.heads
        if (obstacle := division_obstacle(requested, plan.resources.devices, heads)) is not None:
            yield FieldError(field=_FIELD, code="does_not_divide", message=f"is {requested}, which {obstacle}")

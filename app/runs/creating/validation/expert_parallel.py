"""Validation of `resources.expert_parallel`: what can be divided, and by which numbers."""

from collections.abc import Iterator

from anneal.contracts.errors import FieldError
from anneal.contracts.training_config.expert_parallel import (
    MODEL_TYPES,
    devices_message,
    expert_parallel_obstacles,
    fitting_groups,
)
from app.estimator.architecture import Architecture
from app.runs.creating.plan import RunPlan

_FIELD = "resources.expert_parallel"


def expert_parallel_problems(plan: RunPlan, model: Architecture | None) -> Iterator[FieldError]:
    """Yield the reasons why the experts of the model cannot be divided among the devices as requested.

    The model may not be known here, such as one on the hub; then the trainer checks it.
    """
    resources, experts = plan.resources, None if model is None or model.experts is None else model.experts.number
    if resources.expert_parallel > 1 and model is not None and (experts is None or model.family not in MODEL_TYPES):
        why = f"the base model has no experts that can be divided; models of {', '.join(MODEL_TYPES)} have"
        yield FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}")
    elif resources.expert_parallel > 1:
        reasons = expert_parallel_obstacles(plan.config)
        if resources.sharding == "none":
            reasons.append("experts are divided only in a sharded model; set `resources.sharding` to `full` or `auto`")
        for why in reasons:
            yield FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}")
        if resources.expert_parallel not in fitting_groups(resources.devices, experts):
            message = f"is {resources.expert_parallel}, and {devices_message(resources.devices, experts)}"
            yield FieldError(field=_FIELD, code="does_not_divide", message=message)

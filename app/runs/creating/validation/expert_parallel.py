"""Validation of `resources.expert_parallel`: what can be divided, and by which numbers."""

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


def expert_parallel_problems(plan: RunPlan, model: Architecture | None) -> list[FieldError]:
    """Return the reasons why the experts of the model cannot be divided among the devices as requested.

    The model may not be known here, such as one on the hub; then the trainer checks it.
    """
    resources = plan.resources
    if resources.expert_parallel == 1:
        return []
    experts = None if model is None or model.experts is None else model.experts.number
    if model is not None and (experts is None or model.family not in MODEL_TYPES):
        why = f"the base model has no experts that can be divided; models of {', '.join(MODEL_TYPES)} have"
        return [FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}")]
    reasons = expert_parallel_obstacles(plan.config)
    if resources.sharding == "none":
        reasons.append("experts are divided only in a sharded model; set `resources.sharding` to `full` or `auto`")
    problems = [FieldError(field=_FIELD, code="not_supported", message=f"must be 1: {why}") for why in reasons]
    if resources.expert_parallel not in fitting_groups(resources.devices, experts):
        message = f"is {resources.expert_parallel}, and {devices_message(resources.devices, experts)}"
        problems.append(FieldError(field=_FIELD, code="does_not_divide", message=message))
    return problems

"""Facts of a run that its trainer reports in `ConfigRecord`; untrusted, like everything that a trainer reports.

Further facts are allowed. They are shown, and nothing computes with them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic reads no TypedDict of `typing` before Python 3.12

_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Steps = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_Operations = Annotated[float, Field(ge=1, le=1e20)]


class AlternativeStep(TypedDict):
    """Another micro-batch that the planner of a step considered; for clients."""

    rows: Annotated[int, Field(ge=1)]
    recomputed: _Count
    needed_bytes: _Count | None
    step_seconds: _Seconds


class PlannedStep(TypedDict):
    """Step that the planner chose; for clients."""

    batch_size: Annotated[int, Field(ge=1)]
    gradient_accumulation_steps: Annotated[int, Field(ge=1)]
    recomputed_layers: _Count
    layers: _Count
    usable_bytes: _Count
    needed_bytes: _Count | None
    step_seconds: _Seconds | None
    fits: bool
    alternatives: list[AlternativeStep]


class RunFacts(BaseModel):
    """Facts that the service and its clients compute with; None if the trainer did not report a valid value."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    device: str | None = None
    """cpu or cuda."""
    device_name: str | None = None
    attention: str | None = None
    kernels: dict[str, str | None] | None = None
    parameters_total: _Count | None = None
    parameters_trainable: _Count | None = None
    total_steps: _Steps | None = None
    whole_run_steps: _Steps | None = None
    """Steps of the run that a probe stands for."""
    flops_sequence_length: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Mean number of tokens of a sequence."""
    flops_per_token: _Operations | None = None
    flops_per_token_hardware: _Operations | None = None
    """Operations per token that the device executes, with those that are repeated."""
    compile_seconds: _Seconds | None = None
    fidelity_reasons: list[str] | None = None
    step_plan: PlannedStep | None = None


def invalid_facts(reported: Mapping[str, object]) -> list[str]:
    """Return the names of the facts that do not have the type or the range that `RunFacts` declares, sorted."""
    try:
        RunFacts.model_validate(dict(reported))
    except ValidationError as invalid:
        return sorted({str(error["loc"][0]) for error in invalid.errors(include_url=False, include_input=False)})
    return []


def read_facts(reported: Any) -> RunFacts:
    """Return the valid facts of those that were stored; earlier versions stored them unchecked."""
    if not isinstance(reported, Mapping):
        return RunFacts()
    invalid = invalid_facts(reported)
    return RunFacts.model_validate({name: value for name, value in reported.items() if name not in invalid})

"""Wire models of estimates."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

from anneal.contracts.schemas.short_repr import ShortRepr

MEMORY: JsonDict = {
    "weights": 5332.5, "quantization_constants": 105.9, "adapter": 160.0, "reference": 0.0, "gradients": 160.0,
    "optimizer": 320.0, "activations": 7194.7, "logits": 280.5, "workspace": 112.0, "generation": 0.0,
    "context": 600.0, "total": 14173.5,
}  # fmt: skip
_DEVICE: JsonDict = {"kind": "cuda", "name": "NVIDIA H100", "memory_mb": 81559}
EXAMPLE: JsonDict = {
    "parameters": {"total": 8030261248, "trainable": 41943040}, "memory_mb": MEMORY, "device": _DEVICE,
    "gradient_checkpointing": "off", "steps": 790, "tokens": 2193798, "flops": 6.689602085978112e16, "seconds": 312.0,
    "cost": {"amount": 0.2167, "currency": "EUR"}, "confidence": {"memory": "formula", "seconds": "history"},
    "fits": [
        {
            "device": _DEVICE, "fits": True, "total_mb": 14173.5, "gradient_checkpointing": "off",
            "reason": "The run needs about 13.8 GiB of the 79.6 GiB that the device has.", "advice": [],
        }
    ],
    "assumptions": ["The context of CUDA and its libraries takes 600 MiB before any tensor."], "unknown": [],
}  # fmt: skip


def _in_order(memory: dict[str, float]) -> dict[str, float]:
    """Sort components in the documented order with `total` last; the database does not preserve the order."""
    return {name: memory[name] for name in sorted(memory, key=(*MEMORY, *memory).index)}


class Parameters(BaseModel):
    """Parameter counts of the model."""

    total: int = Field(description="Parameters of the base model, without adapters.")
    trainable: int


class EstimatedDevice(BaseModel):
    """Kind of device that online workers offer and the request allows, or the assumed one if there is none."""

    kind: Literal["cpu", "cuda"]
    name: str | None
    memory_mb: int | None


class Cost(BaseModel):
    """Cost of the run at the operator's price per GPU hour (ANNEAL_GPU_HOUR_PRICES, ANNEAL_GPU_HOUR_PRICE)."""

    amount: float
    currency: str


class Confidence(BaseModel):
    """Source of the figures."""

    memory: Literal["formula"] | None = Field(
        description="`formula`: computed from the model's config.json; null: not known."
    )
    seconds: Literal["history", "comparable", "assumed"] | None = Field(
        description="`history`: measured speed of earlier runs of the same model and method; `comparable`: measured "
        "operations per second of other runs on this kind of device; `assumed`: an assumed speed; null: not known."
    )


class Fit(BaseModel):
    """Fit of the run on one kind of device."""

    device: EstimatedDevice
    fits: bool | None = Field(description="True if the run fits in the device's memory; null if not known.")
    total_mb: float | None
    gradient_checkpointing: Literal["off", "selective", "full"] | None = Field(
        description="Gradient checkpointing that would be used on this device."
    )
    reason: str
    advice: list[str] = Field(description="Changes that make the run fit; empty if it fits.")


class Unknown(BaseModel):
    """Field that cannot be estimated, and the reason."""

    field: str
    reason: str


class RunEstimate(ShortRepr):
    """Estimated resources of a run; a value that cannot be estimated is null, with its reason under `unknown`."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE})

    parameters: Parameters | None
    memory_mb: Annotated[dict[str, float], AfterValidator(_in_order)] | None = Field(
        description="MiB by component; `total` is the peak within a step. Not all components are allocated at the same "
        "time, so `total` is less than their sum."
    )
    device: EstimatedDevice = Field(description="Device for which memory and time are estimated.")
    gradient_checkpointing: Literal["off", "selective", "full"] | None
    steps: int | None
    tokens: int | None = Field(description="Tokens in all steps, without padding.")
    flops: float | None = Field(
        description="Floating-point operations of matrix products in all steps, including recomputation, the reference "
        "model and generation of completions."
    )
    seconds: float | None = Field(description="Training time only, without loading, evaluation and saving.")
    cost: Cost | None = Field(description="Cost of the training time; null if the price or the time is not known.")
    confidence: Confidence
    fits: list[Fit] = Field(
        description="Fit on each kind of device that online workers offer and `resources` allows; an estimate stored "
        "with a run has only the first."
    )
    assumptions: list[str]
    unknown: list[Unknown]


class Measured(BaseModel):
    """Measured resources of a run, for comparison with its estimate."""

    peak_memory_mb: float | None = Field(
        description="Peak memory. On a GPU: tensors without the CUDA context; on a CPU: the whole process."
    )
    reserved_memory_mb: float | None = Field(
        default=None, description="On a GPU: peak memory reserved by the allocator, including free blocks."
    )
    tokens_per_second: float | None
    step_seconds: float | None = Field(
        default=None, description="Seconds per step between the two newest metrics, including the wait for data."
    )


class ProbeResult(BaseModel):
    """Projection of the whole run from a probe: two steps on the longest rows."""

    fits: bool | None = Field(
        description="True if the run fits on the probed device. False: the device ran out of memory. Null: nothing is "
        "measured yet, the host ran out of memory, or the probe ended for another reason."
    )
    steps: int | None = Field(
        description="Steps of the whole run, as estimated; for packed data and `rlhf` as counted by the trainer, less "
        "the rows held out by `eval_split`, and up to `stop_at_step`."
    )
    seconds: float | None = Field(
        description="Duration of these steps: the estimated tokens at the measured speed, at most `seconds_at_most`."
    )
    seconds_at_most: float | None = Field(
        description="Duration of these steps if all rows were as long as the longest."
    )
    message: str


class Estimated(RunEstimate):
    """Estimate, with the probe run if one was requested."""

    model_config = ConfigDict(json_schema_extra={"example": {**EXAMPLE, "probe_run_id": None}})

    probe_run_id: str | None = Field(default=None, description="ID of the probe run; null without `probe`.")
    measured: Measured | None = Field(default=None, description="Measurements of the probe; null until it reports any.")
    probe: ProbeResult | None = Field(default=None, description="Result of the probe; null without `probe`.")


class KeptEstimate(RunEstimate):
    """Estimate as stored; for a probe it includes settings of the whole run that the probe omits."""

    eval_split: float = 0.0
    stop_at_step: int | None = None


def parse_stored(document: dict[str, Any]) -> KeptEstimate | None:
    """Parse a stored estimate; return None if another version stored it in a different form."""
    try:
        return KeptEstimate.model_validate(document)
    except ValidationError:
        return None

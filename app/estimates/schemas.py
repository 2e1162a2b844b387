"""Estimates on the wire."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

MEMORY: JsonDict = {
    "weights": 5332.5, "quantization_constants": 105.9, "adapter": 80.0, "reference": 0.0, "gradients": 80.0,
    "optimizer": 81.2, "activations": 10484.6, "logits": 129.7, "workspace": 112.0, "generation": 0.0,
    "context": 600.0, "total": 16906.2,
}  # fmt: skip
_DEVICE: JsonDict = {"kind": "cuda", "name": "NVIDIA H100", "memory_mb": 81559}
EXAMPLE: JsonDict = {
    "parameters": {"total": 8030261248, "trainable": 41943040}, "memory_mb": MEMORY, "device": _DEVICE,
    "gradient_checkpointing": "off", "steps": 790, "tokens": 2193798, "flops": 6.689602085978112e16, "seconds": 312.0,
    "cost": {"amount": 0.2167, "currency": "EUR"}, "confidence": {"memory": "formula", "seconds": "history"},
    "fits": [
        {
            "device": _DEVICE, "fits": True, "total_mb": 16906.2, "gradient_checkpointing": "off",
            "reason": "The run needs about 16.5 GiB of the 79.6 GiB that the device has.", "advice": [],
        }
    ],
    "assumptions": ["The context of CUDA and its libraries takes 600 MiB before any tensor."], "unknown": [],
}  # fmt: skip


def _in_order(memory: dict[str, float]) -> dict[str, float]:
    """Components as they are documented and `total` last, however the database has kept them."""
    return {name: memory[name] for name in sorted(memory, key=(*MEMORY, *memory).index)}


class Parameters(BaseModel):
    """Parameters of the model."""

    total: int = Field(description="Of the base model; an adapter comes on top.")
    trainable: int


class EstimatedDevice(BaseModel):
    """A kind of device that workers offer, or the one that is assumed while there is none."""

    kind: Literal["cpu", "cuda"]
    name: str | None
    memory_mb: int | None


class Cost(BaseModel):
    """What the time costs on the operator's terms (ANNEAL_GPU_HOUR_PRICE)."""

    amount: float
    currency: str


class Confidence(BaseModel):
    """Where figures come from."""

    memory: Literal["formula"] | None = Field(description="`formula`: from the model's config.json; null: not known.")
    seconds: Literal["history", "comparable", "assumed"] | None = Field(
        description="`history`: runs of this model and method were this fast here; `comparable`: other runs were, by "
        "operations a second; `assumed`: a stated speed; null: not known."
    )


class Fit(BaseModel):
    """Whether a kind of device has room for the run."""

    device: EstimatedDevice
    fits: bool | None = Field(description="Null: not known.")
    total_mb: float | None
    gradient_checkpointing: Literal["off", "selective", "full"] | None = Field(
        description="What is computed again in the backward pass there."
    )
    reason: str
    advice: list[str] = Field(description="What to change where it does not fit.")


class Unknown(BaseModel):
    """Something that cannot be estimated, and why."""

    field: str
    reason: str


class RunEstimate(BaseModel):
    """What a run would take; null is what cannot be known, with its reason under `unknown`."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE})

    parameters: Parameters | None
    memory_mb: Annotated[dict[str, float], AfterValidator(_in_order)] | None = Field(
        description="MiB by component, and `total` at the highest moment of a step, at which not all are there at once."
    )
    device: EstimatedDevice = Field(description="What memory and time are told for.")
    gradient_checkpointing: Literal["off", "selective", "full"] | None
    steps: int | None
    tokens: int | None = Field(description="In all steps, padding left out.")
    flops: float | None = Field(
        description="Operations of products in all steps, those done twice, of a reference and of writing completions "
        "included."
    )
    seconds: float | None = Field(description="Of training alone: no loading, evaluation or saving.")
    cost: Cost | None = Field(description="Null without a price or a time.")
    confidence: Confidence
    fits: list[Fit] = Field(
        description="By kind of device that workers offer now; the estimate that a run keeps has the first alone."
    )
    assumptions: list[str]
    unknown: list[Unknown]


class Measured(BaseModel):
    """What a run has really taken, to be held against its estimate."""

    peak_memory_mb: float | None = Field(
        description="On a GPU: of tensors, without the context; on a CPU: of the whole process."
    )
    reserved_memory_mb: float | None = Field(
        default=None, description="On a GPU: what the allocator had reserved at most, free pieces included."
    )
    tokens_per_second: float | None
    step_seconds: float | None = Field(
        default=None, description="Of a step between its two newest metrics, the waiting for data included."
    )


class ProbeResult(BaseModel):
    """What two steps on the longest rows say about the whole run."""

    fits: bool | None = Field(
        description="On the device that measured. False: its memory ran out. Null: nothing is measured yet, the memory "
        "of its host ran out, or the probe ended for another reason."
    )
    steps: int | None = Field(
        description="Of the whole run, as estimated; of packed data and `rlhf` as the trainer counts them, less what "
        "`eval_split` holds out, and up to `stop_at_step`."
    )
    seconds: float | None = Field(
        description="Of all these steps: the estimated tokens at the measured speed, and never more than at most."
    )
    seconds_at_most: float | None = Field(description="Of all these steps, were all rows as long as the longest.")
    message: str


class Estimated(RunEstimate):
    """An estimate, and the run that measures it if one was asked for."""

    model_config = ConfigDict(json_schema_extra={"example": {**EXAMPLE, "probe_run_id": None}})

    probe_run_id: str | None = Field(default=None, description="The run that measures; null without `probe`.")
    measured: Measured | None = Field(default=None, description="What it has measured; null until then.")
    probe: ProbeResult | None = Field(default=None, description="What that means; null without `probe`.")


class KeptEstimate(RunEstimate):
    """An estimate as it is written down; that of a probe with what the whole run has and the probe has not."""

    eval_split: float = 0.0
    stop_at_step: int | None = None


def stored(document: dict[str, Any]) -> KeptEstimate | None:
    """An estimate as it was written down; None: by a version that wrote something else."""
    try:
        return KeptEstimate.model_validate(document)
    except ValidationError:
        return None

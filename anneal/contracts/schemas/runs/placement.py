"""Wire models of the device that a run needs: what it asks for, what that requires, and why it waits."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from anneal.contracts.human_numbers import COUNT, MEBIBYTES
from anneal.contracts.schemas.runs.common import Body

MOST_DEVICES = 1024


def in_words(message: str) -> WrapValidator:
    """Return a validator that replaces the errors of a type with one message."""

    def check_in_words(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check_in_words)


WorkerLabel = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/=-]{0,62}$"),
    in_words(
        "must be at most 63 letters, digits and `. _ : / = -` without spaces, and begin with a letter or a digit, "
        "such as `site-b` or `zone=a`"
    ),
]
"""Label of a worker, such as `site-b` or `zone=a`."""


GpuName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}$"),
    in_words(
        "must be at most 63 letters, digits, spaces and `. _ -`, and begin with a letter or a digit, "
        "such as `h200` or `rtx 4090`"
    ),
]
"""Part of the name of a GPU, in whole words, such as `h200` or `RTX 4090`."""


def name_words(name: str) -> str:
    """Return the words of a device's name in lower case, with one space around each, as names are compared."""
    return f" {' '.join(re.findall('[a-z0-9]+', name.lower()))} "


DeviceCount = Annotated[int, Field(ge=1, le=MOST_DEVICES), COUNT]
# Without the validator there would be two errors: one for the number and one for the word.
DevicesAsked = Annotated[
    DeviceCount | Literal["all"],
    in_words(f"must be a number from 1 to {MOST_DEVICES:,}, or `all`"),
]


def _with_null(schema: dict[str, Any]) -> None:
    """Let each field in the schema of an object also be null."""
    for name, field in schema["properties"].items():
        if {"type": "null"} not in field.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], "description": field["description"]}


class Placement(Body):
    """Where a run may train, apart from the number of devices."""

    kind: Literal["cpu", "cuda"] | None = Field(
        default=None,
        description="Kind of device; null: a GPU if the backend has had a worker with one within the last hour, or if "
        "the configuration needs one, else a CPU. Of backend `ray`: a GPU.",
    )
    gpu: GpuName | None = Field(
        default=None,
        description="Name of the GPU, or some whole words of it, as in `h200`, `A100` or `rtx 4090`; case does not "
        "matter. `GET /v1/workers` has the names. null: any.",
    )
    memory_mb: Annotated[int, Field(ge=1, le=2**24), MEBIBYTES] | None = Field(
        default=None,
        description="Least memory of the device in MiB, or as text with a unit (`80Gi`, `80GB`); null: the estimate, "
        "where there is one.",
    )
    hosts: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of workers that train the run together, on different hosts as a rule. `devices` are those "
        "of all, the same number on each. They share the storage, and have set `ANNEAL_GROUP_INTERFACE`.",
    )
    sharding: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="How several devices hold the model. `none`: each has a replica. `full`: weights, gradients and "
        "optimizer state are divided among them. `auto`: `full` if the estimate of a replica fits no online device and "
        "the run can be divided, decided when the run is created; an evaluation "
        "is divided only by `full`. No effect with one device.",
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of devices that share each sequence: each has so many of its positions, and the attention "
        "of some of the heads. Divides `devices` and the number of attention heads. A step has rows for "
        "`devices` / `sequence_parallel` devices.",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of devices that share the experts of each layer of a mixture-of-experts model: each "
        "computes its part of the experts, for the tokens of all of them. Divides `devices`, which divides the number "
        "of experts. Above 1, the model is sharded (`sharding`: `full`, or `auto`, which is then `full`).",
    )
    labels: list[WorkerLabel] = Field(
        default_factory=list,
        max_length=20,
        description="Labels that the worker must have, all of them; an operator sets them in `ANNEAL_WORKER_LABELS`.",
    )


class Resources(Placement):
    """Resources of a run; what it leaves out follows from its configuration and its estimate."""

    devices: DeviceCount = Field(
        default=1,
        description="Number of devices. Each trains `batch_size` rows at a time, so that a step has this many times as "
        "many rows.",
    )


class ResourceRequest(Placement):
    """Resources that a request asks for; what it leaves out follows from its configuration and its estimate."""

    devices: DevicesAsked = Field(
        default=1,
        description="Number of devices. Each trains `batch_size` rows at a time, so that a step has this many times as "
        "many rows. `all`: as many as the online worker has that has the most of them, of this kind, with this name, "
        "memory and labels; with `hosts`, as many on each as so many workers have. The number is determined when the "
        "run is created, and is part of the run.",
    )

    def with_devices(self, devices: int) -> Resources:
        """Return the resources with a number of devices."""
        return Resources(**self.model_dump(exclude={"devices"}), devices=devices)


class ResourceChanges(ResourceRequest):
    """Changes of the resources of a run: what they leave out stays, and null resets a field to its default."""

    model_config = ConfigDict(json_schema_extra=_with_null)

    @model_validator(mode="before")
    @classmethod
    def _reset_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = ResourceRequest().model_dump()
        return {name: defaults.get(name) if value is None else value for name, value in values.items()}


class Requirements(BaseModel):
    """Conditions that a device must meet to take the run."""

    kind: Literal["cpu", "cuda"] | None = Field(default=None, description="Kind of device; null: see `prefers_gpu`.")
    gpu: str | None = Field(default=None, description="Words of the name of the GPU, in lower case.")
    memory_mb: int | None = Field(default=None, description="Memory that the request asked for, in MiB.")
    estimated_mb: dict[str, int] = Field(
        default_factory=dict,
        description="Least memory in MiB by kind of device, from the estimate; counts if `memory_mb` is null. With "
        "`on_out_of_memory: repair` it is that of one row at a time.",
    )
    labels: list[str] = Field(default_factory=list, description="Labels that the worker must have.")
    sharded: bool = Field(
        default=False, description="True: the model is divided among the devices of the run, as `sharding` asks."
    )
    sequence_parallel: int = Field(default=1, description="Number of devices of the run that share each sequence.")
    expert_parallel: int = Field(
        default=1, description="Number of devices of the run that share the experts of each layer."
    )
    gguf: bool = Field(default=False, description="True: the worker must have the converter of llama.cpp.")
    gguf_quantizer: bool = Field(default=False, description="True: the worker must have the quantizer of llama.cpp.")
    prefers_gpu: bool = Field(
        default=False, description="True: a CPU takes it only if the backend has had no GPU within the last hour."
    )


class PendingReason(BaseModel):
    """Reason why a pending run does not start, other than its place in the queue."""

    code: Literal[
        "no_worker",
        "no_device_of_kind",
        "no_worker_with_labels",
        "no_gguf_converter",
        "too_few_hosts",
        "no_device_fits",
        "devices_paused",
        "reserved",
        "quota",
        "budget",
        "queue_paused",
        "ray_not_configured",
        "ray_unreachable",
        "ray_queued",
        "ray_placing",
        "ray_no_node",
        "ray_job_failed",
        "queued",
    ] = Field(
        description="`no_worker`: no worker of its backend is online; `no_device_of_kind`, `no_worker_with_labels`, "
        "`no_gguf_converter`, `too_few_hosts`, `no_device_fits`: none, or too few, meet its requirements; "
        "`devices_paused`: those that do are paused after an error, or while other programs use their memory; "
        "`reserved`: a worker, or several, keep the devices that it needs until enough of them are free; `quota`: its "
        "key or experiment uses as many devices as it may, or the rest is kept for a run before it; `budget`: its key "
        "has used the device-hours of the month; `queue_paused`: an admin has paused the queue. `queued` (events "
        "only): a worker can take it again. "
        "Of backend `ray`: `ray_not_configured`: the API has no `ANNEAL_RAY_URL`; `ray_unreachable`: the cluster does "
        "not respond; `ray_queued`: others wait for the cluster first; `ray_placing`: Ray has its job, and waits for a "
        "node with so many free devices or starts the worker; `ray_no_node`: as before, and no node of the cluster has "
        "so many devices, or the labels; `ray_job_failed`: the job ended without a worker that took the run, and is "
        "submitted again after a pause."
    )
    message: str = Field(description="The reason in a sentence, with what to do.")

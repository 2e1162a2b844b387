"""Field types shared by wire models, and the changes that a request makes."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PlainSerializer, StringConstraints

JsonObject = dict[str, JsonValue]
"""JSON object with names that its sender chooses."""


def format_timestamp(moment: datetime) -> str:
    """Format a datetime as RFC 3339 in UTC with milliseconds."""
    # `strftime` takes four times as long, and this runs for every event that is read.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


ModelName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=300,
        # Letters of all scripts are allowed. Spaces inside a name are allowed, at its end they are not.
        pattern=r"^/?\w( *[\w.@=+-])*(/\w( *[\w.@=+-])*)*$",
    ),
]
"""A folder below the models root, an absolute path below an allowed root, a hub name, or the id of a run."""

PluginName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Data types of the weights in a GGUF file, by their names in llama.cpp's converter."""

EvaluationSetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]
"""Name of an extra evaluation set, which is part of the names of its metrics: `eval_<name>_loss`."""

DatasetFormat = Literal["chat", "prompt_completion", "text", "preference", "rated", "prompt", "tokenized"]


class Strict(BaseModel):
    """Base class that rejects unknown fields, `"1"` or true for 1, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Annotation of a configuration field: properties that other modules select fields by.

    Every field has one; `anneal.contracts.training_config.field_traits` collects them.
    """

    changeable_on_resume: bool = False
    """A resumed run may change it; changing any other field would silently train something else."""
    affects: Literal["step_time", "duration"] | None = None
    """`step_time`: runs with other values take another time per step. `duration`: the prediction of a run's duration
    reads it."""
    in_probe: bool = True
    """A probe uses the value of the run that it measures, rather than the default."""
    adapter_only: bool = False
    """Applies only to runs with an adapter."""
    four_bit_only: bool = False
    """Applies only to a 4-bit base model."""
    supervised_only: bool = False
    """Applies only to supervised methods."""
    needs_eval_data: bool = False
    """Applies only to runs with evaluation data."""
    needs_samples: bool = False
    """Applies only to runs with `sample_steps`."""
    depends_on_method: bool = False
    """Its valid values depend on the method."""
    usual: tuple[float, float] | None = None
    """Least and greatest usual value; others are warned about. The default is within."""


Timestamp = Annotated[datetime, PlainSerializer(format_timestamp, return_type=str, when_used="json")]
"""Timestamp that serializes as RFC 3339 in UTC with milliseconds."""

DeviceQuota = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
"""Number of devices that the runs of a key or an experiment may use at a time."""

MonthlyHours = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
"""Device-hours that the runs of a key may use in a calendar month."""


_LIMITS = {"max_devices", "max_device_hours"}


def changed_fields(edit: BaseModel) -> dict[str, Any]:
    """Return the fields that a request changes: those it contains; null removes a limit and keeps everything else."""
    sent = edit.model_dump(exclude_unset=True)
    return {name: value for name, value in sent.items() if value is not None or name in _LIMITS}

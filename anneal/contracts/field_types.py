"""Field types shared by wire models, and the changes that a request makes."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer, StringConstraints
from pydantic_core import PydanticCustomError

JsonObject = dict[str, JsonValue]
"""JSON object with names that its sender chooses."""


def format_timestamp(moment: datetime) -> str:
    """Format a datetime as RFC 3339 in UTC with milliseconds."""
    # `strftime` takes four times as long, and this runs for every event that is read.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def json_length(value: Any) -> int | None:
    """Return the number of characters of a value as JSON; None: it is not JSON."""
    try:
        return len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


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

GgufTypeName = Literal[
    "Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "F16", "BF16", "F32",
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ3_S", "IQ3_M", "IQ4_XS", "IQ4_NL",
    "Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "MXFP4_MOE",
]  # fmt: skip
"""Types of llama.cpp's quantizer by its names, the usual one first."""

NEED_IMPORTANCE_MATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S")
"""Types that the quantizer refuses without an importance matrix."""
GGUF_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_WITHOUT_QUANTIZER = ("F32", "F16", "BF16", "Q8_0")


def _normalize_type(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.upper()
    if name in NEED_IMPORTANCE_MATRIX:
        raise PydanticCustomError(
            "needs_importance_matrix",
            "is `{name}`, which llama.cpp writes only with an importance matrix, and a run computes none; use `Q2_K`, "
            "`IQ3_S` or a larger type",
            {"name": name},
        )
    return GGUF_ALIASES.get(name, name)


GgufType = Annotated[GgufTypeName, BeforeValidator(_normalize_type)]
"""Type of the weights, in upper or lower case."""


def needs_quantizer(gguf_type: str) -> bool:
    """Return True if the converter alone does not write a type, whatever its case."""
    return gguf_type.upper() not in _WITHOUT_QUANTIZER


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

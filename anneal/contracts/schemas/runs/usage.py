"""Wire models of the usage of devices."""

from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from anneal.contracts.schemas.estimates import Cost

UsageBy = Literal["key", "experiment", "month", "model", "method"]

_FIGURES: dict[str, JsonValue] = {
    "device_hours": 412.5, "tokens": 10_200_000_000, "cost": {"amount": 1196.25, "currency": "EUR"},
    "unpriced_device_hours": 0.0,
}  # fmt: skip
_ROW: dict[str, JsonValue] = {"group": "key_01k3x9m6q2v8s4t0w7y5z1a3b5", "name": "laptop", **_FIGURES}


class Usage(BaseModel):
    """Usage of devices."""

    model_config = ConfigDict(json_schema_extra={"example": _FIGURES})

    device_hours: float = Field(description="Hours of each device, of all kinds.")
    tokens: int = Field(description="Tokens that were trained, as far as trainers report them, without padding.")
    cost: Cost | None = Field(
        description="Cost of GPUs with a price (ANNEAL_GPU_HOUR_PRICES, ANNEAL_GPU_HOUR_PRICE); null: none has one."
    )
    unpriced_device_hours: float = Field(
        description="Part of `device_hours` that `cost` does not have: no price, CPUs."
    )


class UsageRow(Usage):
    """Usage of a key, an experiment, a month, a model or a method."""

    model_config = ConfigDict(json_schema_extra={"example": _ROW})

    group: str | None = Field(
        description="Id of the key or experiment, month (`2026-01`), base model or method. Null: runs that the service "
        "itself created."
    )
    name: str | None = Field(description="Name of the key or experiment; null for others, and once it is deleted.")


class UsageRead(BaseModel):
    """Usage of devices by group."""

    model_config = ConfigDict(
        validate_by_name=True,
        serialize_by_alias=True,
        json_schema_extra={
            "example": {
                "by": "key", "from": "2026-01-01", "to": "2026-02-01", "data": [_ROW], "has_more": False,
                "total": _FIGURES,
            }
        },
    )  # fmt: skip

    by: UsageBy
    since: date = Field(alias="from", description="First day, in UTC.")
    until: date = Field(alias="to", description="Day after the last one.")
    data: list[UsageRow] = Field(description="Months in order; otherwise most device-hours first, at most a thousand.")
    has_more: bool
    total: Usage = Field(description="Usage of all groups.")

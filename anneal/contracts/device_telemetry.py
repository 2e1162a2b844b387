"""Telemetry of a GPU: what its driver reports, over a few seconds."""

from pydantic import BaseModel, Field


class DeviceTelemetry(BaseModel):
    """Figures of a GPU over `seconds`, sampled once a second; null where the driver does not report one."""

    seconds: float = Field(description="Time that the figures cover.")
    utilization_percent: float | None = Field(
        default=None, description="Mean share of the time in which a kernel ran, in percent."
    )
    memory_mb: int | None = Field(
        default=None, description="Highest memory in use, in MiB, by all processes on the device."
    )
    temperature_celsius: int | None = Field(default=None, description="Highest temperature of the GPU.")
    power_watts: float | None = Field(default=None, description="Mean power draw.")
    sm_clock_mhz: float | None = Field(default=None, description="Mean clock of the multiprocessors.")
    ecc_uncorrected: int | None = Field(
        default=None, description="Uncorrected memory errors since the driver was loaded; null without ECC."
    )

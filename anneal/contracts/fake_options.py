"""Options of the `fake` backend, set in `extra`: durations of the simulated training, and injected faults."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class FakeOptions(BaseModel):
    """Options of the `fake` trainer in addition to the fields of `TrainingConfig`.

    The trainer also supports `max_steps`, `epochs` (with a dataset), `batch_size`, `gradient_accumulation_steps`,
    `save_steps`, `logging_steps`, `eval_steps`, `stop_at_step`, `time_limit_seconds` and `seed`.
    """

    # Strict: other types, such as a string for a number, are rejected when a run is created.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(20, ge=1, le=1_000_000, description="Number of optimizer steps if `max_steps` is not set.")
    step_seconds: float = Field(0.05, ge=0, le=3600, description="Duration of a step.")
    step_jitter: float = Field(
        0.0, ge=0, le=3, description="Sigma of the log-normal distribution of step durations, drawn with `seed`."
    )
    load_seconds: float = Field(0.0, ge=0, le=3600, description="Duration of the loading phase.")
    save_seconds: float = Field(0.0, ge=0, le=3600, description="Time between writing a checkpoint and its commit.")
    log_lines_per_step: int = Field(1, ge=0, le=100_000, description="Lines printed in each step.")
    log_line: str = Field(
        "step {step} loss {loss}",
        max_length=50_000,
        description="Template of a printed line; `{step}` and `{loss}` are replaced.",
    )
    metric_values: int = Field(
        0, ge=0, le=10_000, description="Further values in each metric, with names that no other step has."
    )
    checkpoint_bytes: int = Field(1024, ge=0, le=2**32, description="Size of the weights in a checkpoint.")
    fail_at_step: int | None = Field(None, ge=1, description="Report a failure in this step.")
    fail_code: Literal[
        "out_of_memory",
        "non_finite_loss",
        "bad_data",
        "model_not_found",
        "disk_full",
        "device_error",
        "config_error",
        "internal",
    ] = Field("internal", description="Error code of that failure.")
    crash_at_step: int | None = Field(None, ge=1, description="Crash in this step in the way set by `crash`.")
    crash: Literal["exception", "segv", "kill", "exit", "memory"] = Field(
        "exception",
        description=(
            "Kind of crash: an unhandled exception, SIGSEGV, SIGKILL, a silent exit, or exhausting the memory."
        ),
    )
    non_finite_at_step: int | None = Field(None, ge=1, description="Report a non-finite loss in this step.")
    out_of_memory_above: int | None = Field(
        None, ge=1, description="Report `out_of_memory` in the first step while `batch_size` is above this."
    )
    non_finite_steps: int = Field(
        1,
        ge=1,
        le=1000,
        description="Number of consecutive steps with a non-finite loss, from `non_finite_at_step` on.",
    )
    hang_at_step: int | None = Field(None, ge=1, description="Never finish this step.")
    ignore_stop: bool = Field(False, description="Ignore stop requests.")
    faults_until_attempt: int | None = Field(
        None, ge=1, description="Fail, crash and hang only in attempts up to this one; in all attempts if not set."
    )

    @classmethod
    def parse_stored(cls, extra: Mapping[str, Any]) -> Self:
        """Parse the options of a stored run, leniently: earlier versions accepted values such as `"20"` for 20."""
        return cls.model_validate(extra, strict=False)

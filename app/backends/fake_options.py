"""Options of the `fake` backend, given in `extra`: how long its pretended training takes and how it goes wrong."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class FakeOptions(BaseModel):
    """Everything that the `fake` trainer understands beside the fields of `TrainingConfig`.

    `max_steps`, `epochs` (with a data set), `batch_size`, `gradient_accumulation_steps`, `save_steps`,
    `logging_steps`, `eval_steps`, `stop_at_step`, `time_limit_seconds` and `seed` are honoured as well.
    """

    # What a number or a flag is not, a string for one, is refused when a run is made.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(20, ge=1, le=1_000_000, description="Optimizer steps, unless `max_steps` is set.")
    step_seconds: float = Field(0.05, ge=0, le=3600, description="Duration of a step.")
    step_jitter: float = Field(
        0.0, ge=0, le=3, description="How far durations of steps lie apart: sigma of a log-normal, drawn with `seed`."
    )
    load_seconds: float = Field(0.0, ge=0, le=3600, description="Duration of the loading phase.")
    save_seconds: float = Field(0.0, ge=0, le=3600, description="Time between writing a checkpoint and its commit.")
    log_lines_per_step: int = Field(1, ge=0, le=100_000, description="Lines printed in each step.")
    log_line: str = Field(
        "step {step} loss {loss}",
        max_length=100_000,
        description="What is printed; `{step}` and `{loss}` are filled in.",
    )
    checkpoint_bytes: int = Field(1024, ge=0, le=2**32, description="Size of the weights in a checkpoint.")
    fail_at_step: int | None = Field(None, ge=1, description="Report a failure in this step.")
    fail_code: Literal[
        "out_of_memory",
        "non_finite_loss",
        "bad_data",
        "model_not_found",
        "disk_full",
        "time_limit",
        "config_error",
        "internal",
    ] = Field("internal", description="The error code of that failure.")
    crash_at_step: int | None = Field(None, ge=1, description="Die in this step, in the way that `crash` says.")
    crash: Literal["exception", "segv", "kill", "exit", "memory"] = Field(
        "exception",
        description=(
            "An unhandled exception, SIGSEGV, SIGKILL, an exit without a word, or memory until there is none."
        ),
    )
    non_finite_at_step: int | None = Field(None, ge=1, description="The loss of this step is not a number.")
    out_of_memory_above: int | None = Field(
        None, ge=1, description="Report `out_of_memory` in the first step while `batch_size` is above this."
    )
    non_finite_steps: int = Field(1, ge=1, le=1000, description="So are those of the steps behind it, so many in all.")
    hang_at_step: int | None = Field(None, ge=1, description="Never finish this step.")
    ignore_stop: bool = Field(False, description="Do not listen to stop requests.")
    faults_until_attempt: int | None = Field(
        None, ge=1, description="Fail, crash and hang only in attempts up to this one; unset: in all."
    )

    @classmethod
    def stored(cls, extra: Mapping[str, Any]) -> Self:
        """The options of a stored run: what an earlier version has accepted, as `"20"` for 20, is still understood."""
        return cls.model_validate(extra, strict=False)

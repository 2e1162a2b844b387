"""End of a part of a run on several hosts, which its worker stores for the lead."""

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.field_types import JsonObject


class PartEnd(BaseModel):
    """End of the training processes of a part, or why there were none."""

    model_config = ConfigDict(frozen=True)

    rank: int
    """Rank of the process that ended first, or the first of the part."""
    exit_code: int | None = None
    exit_signal: int | None = None
    out_of_memory: bool = False
    """True if the kernel killed it because the machine ran out of memory."""
    launcher_lost: bool = False
    peer_lost: bool = False
    """True if it only lost the connection to other processes: another end is the cause."""
    failure: JsonObject | None = None
    """Result that the process reported, if it failed (`TrainingResult`)."""
    problem: str | None = None
    """Reason why no process could be started, or why the worker ended all."""
    is_released: bool = False
    """True if the worker was to shut down before it had started a process."""
    last_lines: list[str] = Field(default_factory=list)

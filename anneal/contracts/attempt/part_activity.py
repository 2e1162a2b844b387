"""Activity of the processes of a part of a run on several hosts, which its worker stores with each renewal."""

from pydantic import BaseModel, ConfigDict


class PartActivity(BaseModel):
    """Signs of life of the training processes of a part; only the lead can judge from those of all parts."""

    model_config = ConfigDict(frozen=True)

    silent_seconds: float
    """Seconds since one of them sent or printed something."""
    waiting: list[int] = []
    """Ranks that wait for others."""
    suspended: list[int] = []
    """Ranks whose process is suspended."""

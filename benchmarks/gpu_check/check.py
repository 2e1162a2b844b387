"""Context of a stage: device, folder, deadline and report."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Row, Status, append_row
from worker import devices
from worker.devices import Device


@dataclass(frozen=True)
class Check:
    """One stage of a check."""

    stage: str
    work: Path
    """Scratch folder, shared by the stages."""
    weights: Path
    """Scratch folder of large weights, in memory if there is enough of it."""
    tiny: bool
    """True: a tiny model instead of one in Qwen3-8B's shape."""
    deadline: float
    """Time at which the runner ends the stage, in seconds of CLOCK_MONOTONIC, which processes share."""
    rows: Path

    @property
    def device(self) -> Device:
        """First GPU, or the CPU."""
        gpus = devices.list_gpus()
        return gpus[0] if gpus else Device("cpu", 0, "cpu-0", "", 0)

    @property
    def on_gpu(self) -> bool:
        """True if the stage runs on a GPU."""
        return self.device.kind == "cuda"

    @property
    def job_device(self) -> dict[str, Any]:
        """Device as the file of a job describes it."""
        return asdict(self.device.for_job())

    @property
    def at_once(self) -> int:
        """Number of small runs at the same time: they leave a GPU idle most of the time, but no CPU."""
        return 6 if self.on_gpu else 1

    @property
    def seconds_left(self) -> float:
        """Seconds until the runner ends the stage."""
        return self.deadline - time.monotonic()

    def folder(self, name: str) -> Path:
        """Create a folder for one part of this stage."""
        folder = self.work / self.stage / name.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def record(self, name: str, /, status: Status = "ok", text: str = "", **values: Any) -> None:
        """Record a result: it is on disk when this returns."""
        append_row(self.rows, Row(self.stage, name, status, text, values))

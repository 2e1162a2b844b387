"""Memory of a run: current and peak for every metric, and on request of each step as a file."""

import json
import resource
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker.training.context import TrainingContext
from worker.training.run_state import MEMORY, MOST_RECORDS

SNAPSHOT = "memory_snapshot.pickle"
"""The last allocations on the GPU, for https://pytorch.org/memory_viz; a pickle, which others should not load."""
PROFILE = "memory_profile.json"


def records_allocations(run: TrainingContext) -> bool:
    """Return True if every allocation on the GPU is recorded."""
    return run.machine.kind == "cuda" and run.config.trainer_options.memory_profile is True


def record_allocations(run: TrainingContext) -> None:
    """Start to record the last allocations on the GPU, if the run asks for it; call before the model is loaded."""
    if records_allocations(run):
        torch.cuda.memory._record_memory_history(max_entries=run.config.trainer_options.memory_profile_entries)


class GpuMemory:
    """Memory of tensors on the GPU in MiB; without a GPU, the peak of the process since its start.

    The GPU peak is that since the last metric, although phases of a step may reset the counter in between.
    """

    def __init__(self) -> None:
        self._peak = self._reserved = 0.0

    def end_phase(self) -> dict[str, float]:
        """Return the memory at the end of a phase and the peak within it, and start the next phase."""
        peak = torch.cuda.max_memory_allocated() / 2**20
        self._peak = max(self._peak, peak)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved() / 2**20)
        torch.cuda.reset_peak_memory_stats()
        return {
            "allocated_mb": round(torch.cuda.memory_allocated() / 2**20, 1),
            "reserved_mb": round(torch.cuda.memory_reserved() / 2**20, 1),
            "peak_mb": round(peak, 1),
        }

    def take_peak(self) -> tuple[float | None, dict[str, float]]:
        """Return the peak since the last call, and other values by name.

        Those are the current memory and the peak that the allocator had reserved, or without a GPU the process's peak.
        """
        if not torch.cuda.is_available():
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            return None, {"host_memory_peak_mb": round(most, 1)}
        now = self.end_phase()["allocated_mb"]
        peak, reserved = round(self._peak, 1), round(self._reserved, 1)
        self._peak = self._reserved = 0.0
        return peak, {"gpu_memory_current_mb": now, "gpu_memory_reserved_mb": reserved}


class MemoryProfiler(TrainerCallback):  # type: ignore[misc]
    """Records the memory of each step: forward and backward together, and the optimizer.

    On a GPU allocated, reserved and peak memory; on a CPU the resident memory of the process.
    """

    def __init__(self, run: TrainingContext, gpu: GpuMemory) -> None:
        self._run = run
        self._gpu = gpu
        self._cuda = run.machine.kind == "cuda"
        self._every_allocation = records_allocations(run)
        self._forward_backward: dict[str, float] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        entries = self._run.config.trainer_options.memory_profile_entries
        self._run.report.message(
            f"The memory of the first {MOST_RECORDS[MEMORY]:,} steps is saved with the output as `{PROFILE}`"
            + (f", and the last {entries:,} allocations as `{SNAPSHOT}`." if self._every_allocation else ".")
        )

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._memory_now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._forward_backward = self._memory_now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        phases = {"forward_backward": self._forward_backward, "optimizer": self._memory_now()}
        record = {"step": state.global_step, "attempt": self._run.job.attempt, **phases}
        self._run.append_profile(self._run.memory, record)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._every_allocation:
            torch.cuda.memory._dump_snapshot(str(self._run.folder / SNAPSHOT))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _memory_now(self) -> dict[str, float]:
        if self._cuda:
            return self._gpu.end_phase()
        return {"rss_mb": round(psutil.Process().memory_info().rss / 2**20, 1)}


def write_profile(run: TrainingContext, folder: Path) -> None:
    """Write the memory of all steps into an output as one document, next to the snapshot of a GPU."""
    steps = run.memory.records()
    (folder / PROFILE).write_text(json.dumps({"unit": "MiB", "steps": steps}, allow_nan=False))
    snapshot = run.folder / SNAPSHOT
    if snapshot.exists():
        snapshot.rename(folder / SNAPSHOT)

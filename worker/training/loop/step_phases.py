"""Time of the phases of a step: the forward pass, the backward pass and the optimizer."""

import time
from typing import Any, Literal

import torch

Phase = Literal["forward", "backward", "optimizer"]


class StepPhases:
    """Seconds of each phase since the last metric, if the run measures them (`extra.wall_clock_breakdown`).

    On a GPU they are measured by events on its own clock, so that the host never waits for it.
    """

    def __init__(self, *, is_enabled: bool, on_gpu: bool) -> None:
        self._is_enabled = is_enabled
        self._on_gpu = on_gpu
        self._starts: list[tuple[Phase | None, Any]] = []
        """Phases in their order, each with the moment at which it began; None is the time between two phases."""

    def enter(self, phase: Phase | None) -> None:
        """End the current phase, and begin `phase`; None begins the time after it, which is not measured."""
        if self._is_enabled:
            self._starts.append((phase, self._now()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as `<phase>_seconds`; call between two steps."""
        if not self._starts:
            return {}
        if self._on_gpu:
            self._starts[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in zip(self._starts, self._starts[1:], strict=False):
            if phase is not None:
                elapsed = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
                seconds[f"{phase}_seconds"] = seconds.get(f"{phase}_seconds", 0.0) + elapsed
        self._starts.clear()
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

"""Time of the phases of a step: the forward pass, the backward pass and the optimizer."""

import time
from typing import Any, Literal

import torch

Phase = Literal["forward", "backward", "optimizer"]

_MOST_MOMENTS = 1000
"""Moments that are held at most: a run may log only its last step."""


class StepPhases:
    """Seconds of each phase since the last metric, if the run measures them (`extra.wall_clock_breakdown`).

    On a GPU they are measured by events on its own clock, so that the host never waits for it.
    """

    def __init__(self, *, is_enabled: bool, on_gpu: bool) -> None:
        self._is_enabled = is_enabled
        self._on_gpu = on_gpu
        self._starts: list[tuple[Phase | None, Any]] = []
        """Phases in their order, each with the moment at which it began; None is the time between two phases."""
        self._seconds: dict[str, float] = {}
        """Seconds of the phases before those."""

    def enter_phase(self, phase: Phase | None) -> None:
        """End the current phase, and begin `phase`; None begins the time after it, which is not measured."""
        if not self._is_enabled:
            return
        if len(self._starts) >= _MOST_MOMENTS:
            self._add_up()
        self._starts.append((phase, self._record_moment()))

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as `<phase>_seconds`; call between two steps."""
        self._add_up()
        self._starts.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add_up(self) -> None:
        """Add the seconds of all phases but the current one."""
        if not self._starts:
            return
        if self._on_gpu:
            self._starts[-1][1].synchronize()
        for (phase, start), (_, end) in zip(self._starts, self._starts[1:], strict=False):
            if phase is not None:
                elapsed = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
                self._seconds[f"{phase}_seconds"] = self._seconds.get(f"{phase}_seconds", 0.0) + elapsed
        del self._starts[:-1]

    def _record_moment(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

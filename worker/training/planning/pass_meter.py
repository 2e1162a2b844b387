"""Measurement of a forward and backward pass on the device: peak bytes and seconds."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.memory_planner import USABLE_FRACTION
from worker.training.failures import OUT_OF_MEMORY, classify_error

_SHORT_SECONDS = 20.0
"""A pass that is shorter is measured twice: the first one of a shape may compile or plan kernels, and maps memory."""


class Reading(NamedTuple):
    """Peak bytes and seconds of a pass."""

    peak_bytes: int | None
    """Peak of all tensors; None if the pass ran out of memory."""
    seconds: float


class PassMeter(Protocol):
    """Measures passes on one device."""

    def usable_bytes(self) -> int:
        """Return the bytes that tensors of this process may take at most."""

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors take now."""

    def measure(self, run_pass: Callable[[], None]) -> Reading:
        """Run a pass, once or several times."""

    def release(self) -> None:
        """Free cached memory, and restart the device's own peak."""


def meter_of(machine: DeviceCapabilities) -> PassMeter | None:
    """Return the meter of a device; None for a CPU, on which nothing is planned."""
    return CudaMeter() if machine.kind == "cuda" else None


def measure_pass(meter: PassMeter, run_pass: Callable[[], None]) -> Reading:
    """Measure a pass; one that runs out of memory is no failure."""
    began = time.monotonic()
    try:
        return meter.measure(run_pass)
    except Exception as error:
        if classify_error(error).code != OUT_OF_MEMORY:
            raise
    # Only here is the traceback gone, whose frames hold the tensors of the pass.
    gc.collect()
    meter.release()
    return Reading(None, time.monotonic() - began)


class CudaMeter:
    """Meter of the current GPU: the peak of torch's allocator, and the time between two events on the stream."""

    def usable_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return int((free + torch.cuda.memory_reserved()) * USABLE_FRACTION)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated())

    def measure(self, run_pass: Callable[[], None]) -> Reading:
        peak, seconds = self._measure_once(run_pass)
        if seconds < _SHORT_SECONDS:
            peak_again, seconds_again = self._measure_once(run_pass)
            peak, seconds = max(peak, peak_again), min(seconds, seconds_again)
        return Reading(peak, seconds)

    def _measure_once(self, run_pass: Callable[[], None]) -> tuple[int, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        run_pass()
        end.record()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), begin.elapsed_time(end) / 1000

    def release(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

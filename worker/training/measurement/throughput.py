"""Training speed of a run: steps and the wait for their data, nothing else, and the share of the device used (MFU)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from app.estimator.flops import Operations


class Throughput:
    """Time, rows and operations since the last metric.

    Checkpoints and evaluations come between a step and the wait for the next one, and so never count.
    """

    def __init__(self) -> None:
        self.operations: Operations | None = None
        """Operations of training; None if unknown, in which case there is no MFU."""
        self.peak_tflops: float | None = None
        """Peak of all devices in 10^12 operations per second; None if unknown, in which case there is no MFU."""
        self._step_seconds = 0.0
        self._data_seconds = 0.0
        self._samples = 0
        self._tokens = 0
        self._pairs: Any = 0.0
        self._block: tuple[Any, Any] | None = None
        """Begin and end of the preparation of data within the current step."""

    def begin(self, tokens: int) -> None:
        """Start with `tokens`, the number that the run has already trained on."""
        self._tokens = tokens

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._data_seconds += time.monotonic() - began

    @contextmanager
    def waiting_within_step(self, device: torch.device) -> Iterator[None]:
        """Measure how long the device waits in the block, which prepares the data of the next step."""
        began = _record_moment(device)
        yield
        self._block = began, _record_moment(device)

    def take_wait(self) -> float:
        """Return the seconds that the device has waited within the step, which count as waiting for data.

        On a GPU they are measured on its own clock, on which the block begins when everything launched before it is
        computed; call this when the step is.
        """
        if self._block is None:
            return 0.0
        (began, ended), self._block = self._block, None
        seconds: float
        if isinstance(began, float):
            seconds = ended - began
        else:
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1000
        self._data_seconds += seconds
        return seconds

    def record_step(self, seconds: float, samples: int) -> None:
        """Record a step: its time from the first forward pass to the new weights, and its rows."""
        self._step_seconds += seconds
        self._samples += samples

    def record_forward(self, pairs: Any) -> None:
        """Record a forward pass over so many token pairs (`token_pairs`), which may still be a tensor on the device."""
        self._pairs = self._pairs + pairs

    def take_rates(self, tokens: int) -> tuple[float, dict[str, float]]:
        """Return samples per second, and the rest by name, since the last call; `tokens` is the run's total so far."""
        seconds = max(self._step_seconds + self._data_seconds, 1e-9)
        new = tokens - self._tokens
        values = {
            "tokens_per_second": new / seconds,
            "tokens": tokens,
            "step_seconds": self._step_seconds,
            "data_seconds": self._data_seconds,
        }
        if self.peak_tflops is not None and self.operations is not None:
            values["mfu"] = self.operations.total_for(new, float(self._pairs)) / (seconds * self.peak_tflops * 1e12)
        rate = self._samples / seconds
        self._tokens, self._samples, self._pairs = tokens, 0, 0.0
        self._step_seconds = self._data_seconds = 0.0
        return rate, values


def _record_moment(device: torch.device) -> Any:
    """Return the time, or on a GPU an event at which everything launched before is computed."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def token_pairs(inputs: Any) -> torch.Tensor | float:
    """Return the pairs of tokens in a model's input batch: the sum of squared sequence lengths, without padding.

    The result is a scalar on the device of the batch, because reading it would block the host.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None and "completion_mask" in inputs:
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    if positions is not None:  # packed: n² is the sum of the first n odd numbers
        return (2 * positions.double() + 1).sum()
    return mask.sum(-1).double().square().sum() if mask is not None else 0.0

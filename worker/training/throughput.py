"""How fast a run trains: steps and the waiting for their data, nothing else, and what part of the device that uses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from worker.training.flops import Flops


class Throughput:
    """Time, rows and operations since the last metric.

    Checkpoints and evaluations come between a step and the waiting for the next, and so never count.
    """

    def __init__(self) -> None:
        self.flops: Flops | None = None
        """Operations of a token; known before the first step."""
        self.peak_tflops: float | None = None
        """What the device can do, in 10^12 operations a second; None: not known, and no MFU."""
        self._step_seconds = 0.0
        self._data_seconds = 0.0
        self._samples = 0
        self._tokens = 0
        self._pairs: Any = 0.0

    def begin(self, tokens: int) -> None:
        """Training starts with so many tokens behind it."""
        self._tokens = tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._data_seconds += time.monotonic() - began

    def stepped(self, seconds: float, samples: int) -> None:
        """A step is done: its time from the first forward pass to the new weights, and its rows."""
        self._step_seconds += seconds
        self._samples += samples

    def saw(self, pairs: Any) -> None:
        """A forward pass over so many pairs of tokens (`flops.pairs`), which may still be a tensor on the device."""
        self._pairs = self._pairs + pairs

    def take(self, tokens: int) -> tuple[float, dict[str, float]]:
        """Samples a second, and the rest by name, since the last call; `tokens` are those of the run so far."""
        seconds = max(self._step_seconds + self._data_seconds, 1e-9)
        new = tokens - self._tokens
        told = {
            "tokens_per_second": new / seconds,
            "tokens": tokens,
            "step_seconds": self._step_seconds,
            "data_seconds": self._data_seconds,
        }
        if self.peak_tflops is not None and self.flops is not None:
            told["mfu"] = self.flops.of(new, float(self._pairs)) / (seconds * self.peak_tflops * 1e12)
        rate = self._samples / seconds
        self._tokens, self._samples, self._pairs = tokens, 0, 0.0
        self._step_seconds = self._data_seconds = 0.0
        return rate, told

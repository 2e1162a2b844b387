"""Batches of the next step, collated while the device still computes this one."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from accelerate.state import GradientState

_END = object()


class BatchPrefetch:
    """Reads the batches of the next step from the iterator of an epoch in advance.

    Between two steps a GPU waits for the host, which reads the loss of the step and prepares the next one. Batches are
    collated before that, when the whole step is launched. Their contents and order are the same.
    """

    def __init__(self) -> None:
        self._batches: deque[Any] = deque()
        self._error: Exception | None = None
        """Error of the batch after those in `_batches`, which belongs to the step that has it."""
        self._source: Iterator[Any] = iter(())
        self._count = 0
        self._gradients = GradientState()

    def batches(self, source: Iterator[Any], count: int) -> Iterator[Any]:
        """Return an iterator whose first `count` batches are the next ones of `source`, those read in advance first."""
        if source is not self._source:  # another epoch
            self._batches.clear()
            self._error = None
        self._source, self._count = source, count
        ready = [self._batches.popleft() for _ in range(min(count, len(self._batches)))]
        return chain(ready, source if self._error is None else _raise_error(self._error))

    def read_next_step(self) -> None:
        """Read as many batches as the current step has, up to the end of the epoch."""
        # Reading past the last batch would end the epoch in the state of accelerate.
        while len(self._batches) < self._count and self._error is None and not self._gradients.end_of_dataloader:
            try:
                batch = next(self._source, _END)
            except Exception as error:
                self._error = error
                return
            if batch is _END:
                return
            self._batches.append(batch)


def _raise_error(error: Exception) -> Iterator[Any]:
    raise error
    yield

"""Simulates the queue to predict when each pending run starts. No database.

Whenever a device of a worker becomes free, the worker claims runs as long as one fits its free devices: the first that
fits, by priority and then age. So a run that needs two devices is overtaken by later ones that need one.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

_ANY = -1


@dataclass(frozen=True)
class WorkerSlots:
    """An online worker with its devices."""

    worker_id: str
    backends: frozenset[str]
    kind: str
    device: str
    memory_mb: int
    free: tuple[float, ...]
    """Seconds until each device is free; infinite if unknown."""


@dataclass(frozen=True)
class PendingRun:
    """A pending run in the queue."""

    run_id: str
    backend: str
    kind: str | None
    memory_mb: int
    devices: int
    not_before: float
    """Seconds from now."""

    def fits(self, worker: WorkerSlots) -> bool:
        """Return True if a worker could ever take it, by the same conditions as a claim."""
        return (
            self.backend in worker.backends
            and self.kind in (None, worker.kind)
            and self.memory_mb <= worker.memory_mb
            and self.devices <= len(worker.free)
        )


@dataclass(frozen=True)
class PredictedStart:
    """Predicted start of a pending run."""

    seat: WorkerSlots | None
    """Worker on which it starts; None: no worker could take it."""
    start: float
    """Seconds from now; infinite if unknown."""
    before: int = 0
    """Runs ahead of it in the queue that start earlier, or may, on a worker that could take it as well."""


@dataclass
class _Line:
    """Pending runs with the same requirements, so that a worker fits all of them or none."""

    one: PendingRun
    fitting: frozenset[int]
    """Indexes of the workers that could take them."""
    ready: list[int] = field(default_factory=list)
    """Their positions in the queue, as a heap."""


def simulate_queue(
    seats: Iterable[WorkerSlots], queue: Sequence[PendingRun], seconds: Callable[[PendingRun, WorkerSlots], float]
) -> dict[str, PredictedStart]:
    """Predict where and when each run of a queue starts, by id; `seconds` returns the duration of one on a worker.

    It is called once for each run that starts, in the order of starts, and may return infinity for unknown.
    """
    return _Play(list(seats), queue, seconds).found


class _Play:
    """Simulation of events `(when, worker)`: a device of that worker becomes free, or a delay ends."""

    def __init__(
        self,
        workers: list[WorkerSlots],
        queue: Sequence[PendingRun],
        seconds: Callable[[PendingRun, WorkerSlots], float],
    ) -> None:
        self._workers, self._queue, self._seconds = workers, queue, seconds
        self._free = [list(worker.free) for worker in workers]
        self._events = [(when, at) for at, worker in enumerate(workers) for when in worker.free if when < math.inf]
        self._pauses: list[tuple[float, int]] = []
        lines: dict[tuple[object, ...], _Line] = {}
        self._line_of: list[_Line] = []
        for place, one in enumerate(queue):
            asked = (one.backend, one.kind, one.memory_mb, one.devices)
            if asked not in lines:
                lines[asked] = _Line(one, frozenset(at for at, worker in enumerate(workers) if one.fits(worker)))
            line = lines[asked]
            self._line_of.append(line)
            if one.not_before <= 0:
                line.ready.append(place)
            else:
                self._pauses.append((one.not_before, place))
                self._events.append((one.not_before, _ANY))
        self._fitting = [[line for line in lines.values() if at in line.fitting] for at in range(len(workers))]
        heapq.heapify(self._events)
        heapq.heapify(self._pauses)
        self.found: dict[str, PredictedStart] = {}
        self._run()
        self._leave()
        self._count()

    def _run(self) -> None:
        while self._events and len(self.found) < len(self._queue):
            now, at = heapq.heappop(self._events)
            while self._pauses and self._pauses[0][0] <= now:
                _, place = heapq.heappop(self._pauses)
                heapq.heappush(self._line_of[place].ready, place)
            for worker in range(len(self._workers)) if at == _ANY else (at,):
                self._claim(now, worker)

    def _claim(self, now: float, at: int) -> None:
        """Claim runs for a worker as long as one fits its free devices."""
        worker, free = self._workers[at], self._free[at]
        while idle := [device for device, when in enumerate(free) if when <= now]:
            lines = [line for line in self._fitting[at] if line.ready and line.one.devices <= len(idle)]
            if not lines:
                return
            one = self._queue[heapq.heappop(min(lines, key=lambda line: line.ready[0]).ready)]
            self.found[one.run_id] = PredictedStart(worker, now)
            until = now + self._seconds(one, worker)
            for device in idle[: one.devices]:
                free[device] = until
            if until < math.inf:
                heapq.heappush(self._events, (until, at))

    def _leave(self) -> None:
        """Add the runs that do not start: no worker fits, or it is unknown when one is free."""
        for one, line in zip(self._queue, self._line_of, strict=True):
            if one.run_id not in self.found:
                self.found[one.run_id] = PredictedStart(
                    self._workers[min(line.fitting)] if line.fitting else None, math.inf
                )

    def _count(self) -> None:
        """Count the runs before each run."""
        starts: dict[frozenset[int], list[float]] = defaultdict(list)
        for one, line in zip(self._queue, self._line_of, strict=True):
            turn = self.found[one.run_id]
            # Of runs whose start is unknown, each comes before the next.
            place = bisect_left if turn.start < math.inf else bisect_right
            rivals = [known for fitting, known in starts.items() if not fitting.isdisjoint(line.fitting)]
            self.found[one.run_id] = replace(turn, before=sum(place(known, turn.start) for known in rivals))
            insort(starts[line.fitting], turn.start)

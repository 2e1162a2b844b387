"""Simulates the queue to predict when each pending run starts. No database.

Whenever a device of a worker becomes free, the worker claims runs as long as one fits its free devices: the first that
fits, on the smallest of them that it fits. The order is that of claims: by priority, then the devices that the owner
has used lately, then age. Runs that need several devices reserve workers, as in `reservations.py`. A run starts only if
its quotas have room for it.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.runs.scheduler.placement import Needs, RunningRun, WorkerOffer
from app.runs.scheduler.reservations import PendingRun, Reservation, choose_reservations


@dataclass(frozen=True)
class WorkerSlots:
    """An online worker, and when its devices are free."""

    offer: WorkerOffer
    free: tuple[float, ...]
    """Seconds until each device is free; infinite if unknown."""

    def fitting(self, needs: Needs, gpu_backends: frozenset[str]) -> tuple[int, ...]:
        """Return the devices that a run fits on, the smallest first; none if the worker cannot take it."""
        offer = self.offer
        if not needs.allows_worker(offer, gpu_backends):
            return ()
        found = [at for at, device in enumerate(offer.devices) if needs.fits(offer.kind, device)]
        found.sort(key=lambda at: offer.devices[at].memory_mb)
        return tuple(found) if len(found) >= needs.devices_each else ()


@dataclass(frozen=True)
class PredictedStart:
    """Predicted start of a pending run."""

    worker: WorkerSlots | None
    """Worker on which it starts, one of them if it needs several; None: no worker could take it."""
    start: float
    """Seconds from now; infinite if unknown."""
    before: int
    """Runs that start before it on a worker that could take it as well."""


def fitting_devices(
    queue: Sequence[PendingRun], workers: Sequence[WorkerSlots], gpu_backends: frozenset[str]
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return, for each run of a queue, the workers that could take it, with the devices on which it fits."""
    return {
        run.run_id: {
            at: devices for at, worker in enumerate(workers) if (devices := worker.fitting(run.needs, gpu_backends))
        }
        for run in queue
    }


def simulate_queue(
    workers: Sequence[WorkerSlots],
    queue: Sequence[PendingRun],
    seconds: Callable[[PendingRun, WorkerSlots], float],
    gpu_backends: frozenset[str] = frozenset(),
    reserved: Mapping[str, Sequence[str]] | None = None,
    used: Mapping[str, float] | None = None,
    running: Sequence[RunningRun] = (),
    rooms: Mapping[str, int] | None = None,
) -> dict[str, PredictedStart]:
    """Predict where and when each run of a queue starts, by id; `seconds` returns the duration of one on a worker.

    It may return infinity for unknown. `gpu_backends` are those of `Fleet`; `reserved` has the ids of the workers that
    runs have reserved, `used` the device-seconds of owners, to which those of `running` runs are added, and `rooms` the
    devices that quotas leave.
    """
    usage = _Usage(used or {}, running)
    quotas = _Quotas(rooms or {}, running)
    return _Simulation(workers, queue, seconds, gpu_backends, reserved or {}, usage, quotas).run()


class _Usage:
    """Device-seconds of owners at a time of the simulation. What is forgotten meanwhile does not matter."""

    def __init__(self, used: Mapping[str, float], running: Sequence[RunningRun]) -> None:
        self._used = defaultdict(float, used)
        self._running = [(one.owner, one.devices, one.end) for one in running]
        self._at = 0.0

    def advance(self, now: float) -> None:
        """Add what runs use until `now`."""
        if now <= self._at:  # as of most events: all workers are looked at again whenever a run on several has started
            return
        for owner, devices, end in self._running:
            self._used[owner] += devices * max(min(now, end) - self._at, 0.0)
        self._running = [one for one in self._running if one[2] > now]
        self._at = now

    def start(self, owner: str, devices: int, end: float) -> None:
        """Add a run that starts now."""
        self._running.append((owner, devices, end))

    def place(self, run: PendingRun) -> tuple[int, float, str]:
        """Return the place of a run in the queue; less is earlier."""
        return -run.priority, self._used[run.owner], run.run_id


class _Quotas:
    """Devices that quotas leave at a time of the simulation."""

    def __init__(self, rooms: Mapping[str, int], running: Sequence[RunningRun]) -> None:
        self._rooms = dict(rooms)
        self._ends = [
            (one.end, one.devices, limited)
            for one in running
            if (limited := self._limited(one.quotas)) and one.end < math.inf
        ]
        heapq.heapify(self._ends)

    def _limited(self, quotas: Iterable[str]) -> tuple[str, ...]:
        return tuple(one for one in quotas if one in self._rooms)

    @property
    def ends(self) -> set[float]:
        """Times at which runs give devices of quotas back, as far as they are known."""
        return {end for end, *_ in self._ends}

    def advance(self, now: float) -> bool:
        """Return the devices of the runs that have ended by `now` to their quotas; return True if there are any."""
        has_ended = bool(self._ends) and self._ends[0][0] <= now
        while self._ends and self._ends[0][0] <= now:
            _, devices, quotas = heapq.heappop(self._ends)
            for one in quotas:
                self._rooms[one] += devices
        return has_ended

    def is_full(self, quota: str) -> bool:
        """Return True if a quota has no room for any run."""
        return self._rooms.get(quota, 1) < 1

    def allow(self, run: PendingRun) -> bool:
        """Return True if the quotas of a run have room for it."""
        return all(run.needs.devices <= self._rooms.get(one, math.inf) for one in run.quotas)

    def start(self, run: PendingRun, end: float) -> bool:
        """Take the devices of a run that starts now; return True if a quota has them back at `end`."""
        quotas = self._limited(run.quotas)
        for one in quotas:
            self._rooms[one] -= run.needs.devices
        if quotas and end < math.inf:
            heapq.heappush(self._ends, (end, run.needs.devices, quotas))
            return True
        return False


_EACH = -1
"""Place of an event that concerns all workers."""


class _Simulation:
    def __init__(
        self,
        workers: Sequence[WorkerSlots],
        queue: Sequence[PendingRun],
        seconds: Callable[[PendingRun, WorkerSlots], float],
        gpu_backends: frozenset[str],
        reserved: Mapping[str, Sequence[str]],
        usage: _Usage,
        quotas: _Quotas,
    ) -> None:
        self._workers = workers
        self._usage = usage
        self._quotas = quotas
        self._is_blocked = False
        """True if quotas have no room for any run."""
        self._seconds = seconds
        self._fitting = fitting_devices(queue, workers, gpu_backends)
        self._found = {run.run_id: PredictedStart(None, math.inf, 0) for run in queue}
        waiting = [run for run in queue if len(self._fitting[run.run_id]) >= run.needs.hosts]
        self._waiting: dict[str, dict[str, PendingRun]] = defaultdict(dict)
        """Runs by owner and id, in the order in which each owner's are claimed."""
        for run in sorted(waiting, key=lambda one: (-one.priority, one.run_id)):
            self._waiting[run.owner][run.run_id] = run
        self._claims = [0] * len(workers)
        self._free = [list(worker.free) for worker in workers]
        places = {worker.offer.worker_id: at for at, worker in enumerate(workers)}
        self._held: dict[str, set[int]] = {
            run: {places[worker] for worker in some if worker in places} for run, some in reserved.items()
        }
        self._wide = [run for run in waiting if run.needs.devices > 1]
        # Times at which a device of a worker becomes free, or a run may be claimed again.
        pauses = {run.not_before for run in waiting if run.not_before > 0}
        self._events = [
            (when, at) for at, worker in enumerate(workers) for when in {*worker.free, *pauses} if when < math.inf
        ]
        self._events += [(end, _EACH) for end in quotas.ends]
        heapq.heapify(self._events)

    def run(self) -> dict[str, PredictedStart]:
        while self._events and any(self._waiting.values()):
            now, at = heapq.heappop(self._events)
            self._usage.advance(now)
            if self._quotas.advance(now):
                self._is_blocked = False
            for place in range(len(self._workers)) if at == _EACH else (at,):
                self._claim_all(place, now)
        rest = [run for runs in self._waiting.values() for run in runs.values()]
        for run in sorted(rest, key=self._usage.place):
            self._claim(run, next(iter(self._fitting[run.run_id])), math.inf)
        return self._found

    def _claim_all(self, at: int, now: float) -> None:
        """Start runs on the free devices of a worker until none can start there."""
        while not self._is_blocked and any(when <= now for when in self._free[at]):
            allowed = (self._quotas.allow(run) for runs in self._waiting.values() for run in runs.values())
            if not any(allowed):
                self._is_blocked = True  # or each idle worker would look at the whole queue at each event
                break
            reservation = self._reservation(at, now)
            found = [
                first
                for owner, runs in self._waiting.items()
                if not self._quotas.is_full(owner)
                and (first := self._first_ready(runs.values(), at, now, reservation)) is not None
            ]
            if not found:
                break
            run, on = min(found, key=lambda one: self._usage.place(one[0]))
            self._start(run, on, at, now)

    def _first_ready(
        self, runs: Iterable[PendingRun], at: int, now: float, reservation: Reservation | None
    ) -> tuple[PendingRun, dict[int, list[int]]] | None:
        """Return the first of these runs that a worker can claim now, and the free devices on which it fits."""
        for run in runs:
            if run.not_before > now or not self._quotas.allow(run):
                continue
            places = [at] if run.needs.hosts == 1 else self._hosts(run, reservation)
            on = {place: self._idle(run, place, now) for place in places}
            is_enough = bool(on) and all(len(idle) >= run.needs.devices_each for idle in on.values())
            if is_enough and (reservation is None or self._may_precede(run, reservation, now)):
                return run, on
        return None

    def _hosts(self, run: PendingRun, reservation: Reservation | None) -> Collection[int]:
        """Return the workers that a run on several hosts has reserved, if the given reservation is one of them."""
        return self._held[run.run_id] if reservation is not None and reservation.run is run else ()

    def _reservation(self, at: int, now: float) -> Reservation | None:
        """Return the reservation of a worker, and keep those of all for the next time."""
        if not self._wide:
            return None
        made = choose_reservations(
            sorted(filter(self._quotas.allow, self._wide), key=self._usage.place),
            self._fitting,
            self._free,
            now,
            self._held,
            [one.offer.alike for one in self._workers],
        )
        self._held = defaultdict(set)
        for one in made:
            self._held[one.run.run_id].add(one.worker)
        return next((one for one in made if one.worker == at), None)

    def _may_precede(self, run: PendingRun, reservation: Reservation, now: float) -> bool:
        wide = reservation.run
        if self._usage.place(run) <= self._usage.place(wide):
            return True
        if run.needs.devices_each <= reservation.spare:
            return True
        return now + self._seconds(run, self._workers[reservation.worker]) <= reservation.start < math.inf

    def _idle(self, run: PendingRun, at: int, now: float) -> list[int]:
        return [device for device in self._fitting[run.run_id].get(at, ()) if self._free[at][device] <= now]

    def _start(self, run: PendingRun, on: Mapping[int, Sequence[int]], at: int, now: float) -> None:
        self._claim(run, at, now)
        until = now + max(self._seconds(run, self._workers[place]) for place in on)
        self._usage.start(run.owner, run.needs.devices, until)
        if self._quotas.start(run, until):
            heapq.heappush(self._events, (until, _EACH))
        for place, idle in on.items():
            for device in idle[: run.needs.devices_each]:
                self._free[place][device] = until
            if until < math.inf:
                heapq.heappush(self._events, (until, place))
        if run.needs.devices > 1:
            self._wide.remove(run)
            # Its reservation may have kept other workers' devices idle.
            for other in range(len(self._workers)):
                heapq.heappush(self._events, (now, other))

    def _claim(self, run: PendingRun, at: int, start: float) -> None:
        del self._waiting[run.owner][run.run_id]
        before = sum(self._claims[other] for other in self._fitting[run.run_id])
        self._found[run.run_id] = PredictedStart(self._workers[at], start, before)
        self._claims[at] += 1

"""Reservations: which workers keep their devices for a run that needs several of them. No database.

A device that becomes free would otherwise always go to a later run that needs one, and the devices of a run that needs
several would never be free together. So the first such runs of the queue each reserve a worker, or as many as they
need hosts. A later run starts there only if it ends before the reserved one can start, or if it leaves enough devices.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.runs.queue.fit import Needs, WorkerOffer

MOST_RESERVATIONS = 3
"""Runs that reserve workers at a time; each keeps devices idle."""
_CLEARLY_SOONER = 0.8
"""Part of the time to the start on the reserved worker within which another must be free to be chosen instead."""


@dataclass(frozen=True)
class PendingRun:
    """A pending run in the queue."""

    run_id: str
    needs: Needs
    not_before: float
    """Seconds from now."""
    priority: int = 0
    owner: str = ""
    """Owner of the run (see `queue_order.OWNERS`)."""
    quotas: tuple[str, ...] = ()
    """Ids of the key and the experiment whose quotas limit it."""


@dataclass(frozen=True)
class WorkerSlots:
    """An online worker, and when its devices are free."""

    offer: WorkerOffer
    free: tuple[float, ...]
    """Seconds until each device is free; infinite if unknown."""

    def fitting(self, needs: Needs, gpu_backends: frozenset[str]) -> tuple[int, ...]:
        """Return the devices that a run fits on, the smallest first; none if the worker cannot take it."""
        return needs.fitting_devices(self.offer, gpu_backends)


@dataclass(frozen=True)
class Reservation:
    """A worker that keeps devices for a run."""

    run: PendingRun
    worker: int
    """Place of the worker among those given."""
    start: float
    """Seconds from now until the devices of all workers that the run reserves are free; infinite if unknown."""
    spare: int
    """Devices that later runs may use all the same, because so many more fit the run and are free by then."""


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


def choose_reservations(
    queue: Iterable[PendingRun],
    fitting: Mapping[str, Mapping[int, Sequence[int]]],
    free: Sequence[Sequence[float]],
    now: float,
    held: Mapping[str, Collection[int]],
    alike: Sequence[Hashable] = (),
) -> list[Reservation]:
    """Choose workers for each of the first runs of the queue that need several devices: one for each host.

    `fitting` has, for each run and each worker that could take it, the devices on which it fits; `free` has the time
    at which each device of a worker becomes free. A run keeps the workers that it holds already, unless others are free
    clearly sooner: a run that moves with each estimate would wait everywhere and start nowhere. Of the runs on several
    hosts whose start is unknown, only the first reserves workers: no other run can use them meanwhile.

    `alike` has, for each worker, what those of a run share (`WorkerOffer.alike`): its configuration is resolved for the
    devices of one of them, and only processes of one version train together.
    """
    chosen: dict[int, Reservation] = {}
    runs = 0
    waits_without_end = False
    for run in queue:
        if runs == MOST_RESERVATIONS:
            break
        if run.needs.devices == 1 or run.not_before > now:
            continue
        options: dict[Hashable, list[tuple[tuple[float, bool, int], int, float]]] = defaultdict(list)
        for at, devices in fitting[run.run_id].items():
            if at in chosen:
                continue
            start = max(sorted(free[at][device] for device in devices)[run.needs.devices_each - 1], now)
            is_held = at in held.get(run.run_id, ())
            wait = (start - now) * (_CLEARLY_SOONER if is_held else 1.0)
            busy = sum(free[at][device] > now for device in devices)
            options[alike[at] if alike else None].append(((wait, not is_held, busy), at, start))
        groups = [sorted(group)[: run.needs.hosts] for group in options.values() if len(group) >= run.needs.hosts]
        if not groups:
            continue
        best = min(groups, key=lambda group: group[-1])  # the worker that is free last decides
        start = max(one[2] for one in best)
        if run.needs.hosts > 1 and math.isinf(start):
            if waits_without_end:
                continue
            waits_without_end = True
        runs += 1
        for _, at, _ in best:
            by_then = sum(
                free[at][device] <= (now if math.isinf(start) else start) for device in fitting[run.run_id][at]
            )
            chosen[at] = Reservation(run, at, start, max(by_then - run.needs.devices_each, 0))
    return list(chosen.values())

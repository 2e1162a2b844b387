"""Reservations of quotas: which keys and experiments keep devices of their quota for a pending run. No database.

A run on several devices that waits for its quota would always be overtaken by later runs that need fewer. So the first
such run of each quota reserves it, and so does one that has room in its quotas and has reserved workers. A later run
of the key or the experiment starts only if the quota has room for the first one all the same, or will have it in time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.runs.queue.fit import Needs, pending_reason
from app.runs.scheduler.forecast import Forecast


@dataclass(frozen=True)
class QuotaReservation:
    """A quota that keeps devices for a run."""

    quota_id: str
    run_id: str
    start: float
    """Seconds from now until the quota has room for the run; infinite if unknown."""
    spare: int
    """Devices of the quota that later runs may use all the same."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds of later runs that end before `start`, by id."""


@dataclass(frozen=True)
class _Quota:
    id: str
    room: int
    most: int


def choose_quota_reservations(forecast: Forecast, reserved: Mapping[str, float]) -> list[QuotaReservation]:
    """Choose the runs for which quotas are kept, at most one for each quota.

    `reserved` has the runs that reserve workers, with the seconds until the devices are free; infinite if unknown.
    """
    chosen: dict[str, QuotaReservation] = {}
    for run in forecast.pending.values():
        if run.devices_needed == 1 or run.wait > 0:
            continue
        quotas = list(_quotas(run))
        kept = [one for one in quotas if one.id not in chosen and (run.devices_needed > one.room or run.id in reserved)]
        if not kept or any(run.devices_needed > one.most for one in quotas):
            continue
        if pending_reason(_needs(run), forecast.fleet) is not None:
            continue
        start = max(_time_of_room(forecast, one, run.devices_needed) for one in quotas)
        start = max(start, reserved.get(run.id, 0.0))
        for one in kept:
            by_then = one.room + sum(devices for end, devices in _ends(forecast, one) if end <= start < math.inf)
            spare = max(by_then - run.devices_needed, 0)
            chosen[one.id] = QuotaReservation(one.id, run.id, start, spare, _shorter(forecast, run, one, start))
    return list(chosen.values())


def _quotas(run: Any) -> Iterator[_Quota]:
    """Return the quotas that limit a pending run, with the devices that they leave."""
    if run.key_room is not None:
        yield _Quota(run.owner, run.key_room, run.key_devices)
    if run.experiment_room is not None:
        yield _Quota(run.experiment_id, run.experiment_room, run.experiment_devices)


def _needs(run: Any) -> Needs:
    return Needs.of(run.backend, run.devices_needed, run.hosts_needed, run.requirements or {})


def _ends(forecast: Forecast, quota: _Quota) -> list[tuple[float, int]]:
    """Return the ends of the runs that use a quota, each with its devices, the first end first."""
    return sorted(
        (forecast.ends.get(run.id, math.inf), run.devices_needed)
        for run in forecast.live
        if quota.id in (run.owner, run.experiment_id)
    )


def _time_of_room(forecast: Forecast, quota: _Quota, devices: int) -> float:
    """Return the seconds until a quota leaves so many devices; infinite if unknown."""
    room = quota.room
    if room >= devices:
        return 0.0
    for end, freed in _ends(forecast, quota):
        room += freed
        if room >= devices:
            return end
    return math.inf


def _shorter(forecast: Forecast, first: Any, quota: _Quota, start: float) -> dict[str, float]:
    """Return the durations of the other runs of a quota that would end before `start`, on any device."""
    found: dict[str, float] = {}
    if not 0 < start < math.inf:
        return found
    for run in forecast.pending.values():
        if run is first or quota.id not in (run.owner, run.experiment_id):
            continue
        needs = _needs(run)
        fleet = forecast.fleet
        devices = {worker.device for worker in fleet.workers if needs.allows_worker(worker, fleet.gpu_backends)}
        estimates = [forecast.estimate(run, device) for device in devices]
        if estimates and all(estimates):
            seconds = max(one.seconds for one in estimates if one is not None)
            if seconds < start:
                found[run.id] = round(seconds, 1)
    return found

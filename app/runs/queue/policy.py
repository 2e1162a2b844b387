"""Policy of the queue: which pending runs start now and on which devices, and what the others wait for.

Pure: a round plans the whole queue, the forecast moves that plan to later times, and a claim plans for one worker, with
the holds of the last round. The rules:

1. Runs are considered by priority, then by what their owner has used lately, then by age.
2. A run takes the smallest devices that it fits, on the worker that has the fewest other free devices, so that larger
   runs and runs on several devices find room later. A worker claims for itself, so which worker is first a matter of
   which one asks first; a plan of the whole queue is a prediction of that.
3. A run on several devices that finds too few free ones holds a worker, or one for each host that it needs. A later
   run starts there only if it is predicted to end before the first one can start, or leaves it enough devices.
4. The quotas of a run's API key and experiment limit the devices that their runs use together. A run on several
   devices that waits holds its quotas in the same way.
5. While the queue is paused, no run starts. Runs hold workers and quotas all the same, so that the first ones to start
   afterwards are those that would have been.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from app.runs.queue.fit import Fleet, Needs, WorkerOffer

MOST_HOLDS = 3
"""Most runs that hold workers at a time: each keeps devices idle."""
OrderKey = tuple[int, float, str]
"""Place of a run in the queue; the smallest is first."""
_CLEARLY_SOONER = 0.8
"""A run moves from the workers that it holds to others only if those are free within this part of the wait."""


@dataclass(frozen=True)
class WaitingRun:
    """Pending run; times are seconds after the snapshot."""

    run_id: str
    needs: Needs
    priority: int = 0
    owner: str = ""
    quotas: tuple[str, ...] = ()
    """Ids of its API key and its experiment."""
    not_before: float = 0.0
    is_ready: bool = True
    """False: processes of an earlier attempt may still run, so it only holds what it needs."""


@dataclass(frozen=True)
class TrainingRun:
    """Run that uses devices."""

    run_id: str
    devices: int
    owner: str = ""
    quotas: tuple[str, ...] = ()
    end: float = math.inf
    """Seconds after the snapshot when it frees its devices; infinite if unknown."""


@dataclass(frozen=True)
class Snapshot:
    """State of the queue and of all devices at one moment."""

    fleet: Fleet
    waiting: Sequence[WaitingRun]
    seconds: Callable[[WaitingRun, WorkerOffer], float]
    """Predicted duration of a run on a worker; infinite if unknown."""
    training: Sequence[TrainingRun] = ()
    used: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds that each owner has used lately."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Most devices at a time of each quota."""
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Workers that runs hold since the last plan."""
    claim: "Claim | None" = None
    """Worker that asks for a run; None: all workers take runs."""


@dataclass(frozen=True)
class Claim:
    """Worker that asks for a run, and what the last plan of the whole queue holds.

    Only it takes runs; of a run on several hosts that holds workers it is the lead. It makes no holds: alone it does
    not know which workers are free first.
    """

    worker_id: str
    holds: Mapping[str, "Hold"] = field(default_factory=dict)
    """Workers that runs hold, by id of the run."""
    quota_holds: Mapping[str, "QuotaHold"] = field(default_factory=dict)
    """Quotas that runs hold, by id of the quota."""


@dataclass(frozen=True)
class Assignment:
    """Devices on which a run starts: their indexes by worker, the lead of several hosts first."""

    run: WaitingRun
    devices: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Hold:
    """Workers that keep devices for a run on several devices."""

    run: WaitingRun
    start: float
    """Seconds after the snapshot when all of them have enough free devices; infinite if unknown."""
    devices: Mapping[str, frozenset[int]]
    """Devices of each worker that fit the run and are free at its start."""

    def spare(self, worker_id: str) -> int:
        """Return how many devices of a worker later runs may use however long they take."""
        return max(len(self.devices[worker_id]) - self.run.needs.devices_each, 0)


@dataclass(frozen=True)
class QuotaHold:
    """Quota that keeps devices for a run on several devices."""

    run: WaitingRun
    start: float
    """Seconds after the snapshot when the run can start; infinite if unknown."""
    spare: int
    """Devices of the quota that later runs may use however long they take."""


@dataclass(frozen=True)
class Plan:
    """Result of `schedule`."""

    assignments: list[Assignment] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    quota_holds: dict[str, QuotaHold] = field(default_factory=dict)
    """Holds of quotas, by id of the quota."""
    room: dict[str, int] = field(default_factory=dict)
    """Devices that each quota leaves once these runs have started."""


def order_key(run: WaitingRun, used: Mapping[str, float]) -> OrderKey:
    """Return the place of a run in the queue (in SQL `order.QUEUE_ORDER`).

    Ids of runs begin with their time of creation.
    """
    return -run.priority, used.get(run.owner, 0.0), run.run_id


def quota_holder(run: WaitingRun, snapshot: Snapshot, plan: Plan) -> str | None:
    """Return the id of the earlier run that would wait longer for a quota if a run started now; None if none would."""
    place = order_key(run, snapshot.used)
    for quota in run.quotas:
        hold = plan.quota_holds.get(quota)
        if hold is None or order_key(hold.run, snapshot.used) >= place or run.needs.devices <= hold.spare:
            continue
        workers = [
            worker for worker in snapshot.fleet.workers if run.needs.allows_worker(worker, snapshot.fleet.gpu_backends)
        ]
        longest = max((snapshot.seconds(run, worker) for worker in workers), default=math.inf)
        if not longest <= hold.start < math.inf:
            return hold.run.run_id
    return None


def schedule(snapshot: Snapshot) -> Plan:
    """Return which runs of a snapshot start now, and what keeps others waiting."""
    return QueueState(snapshot).schedule(0.0)


class QueueState:
    """Devices, quotas and usage of a snapshot at a later time, as they will be if predictions hold."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.workers = {worker.worker_id: worker for worker in snapshot.fleet.workers}
        ends = {run.run_id: run.end for run in snapshot.training}
        self.frees_at = {
            worker.worker_id: [
                math.inf if device.paused else 0.0 if device.run_id is None else ends.get(device.run_id, math.inf)
                for device in worker.devices
            ]
            for worker in snapshot.fleet.workers
        }
        """Seconds after the snapshot when each device of a worker is free."""
        self.held_mb = {
            worker.worker_id: [device.held_mb for device in worker.devices] for worker in snapshot.fleet.workers
        }
        """Memory of its run on each device, which counts until the device is free."""
        self.held = {run_id: tuple(worker_ids) for run_id, worker_ids in snapshot.held.items()}
        self.waiting = {run.run_id: run for run in snapshot.waiting}
        self.used = defaultdict(float, snapshot.used)
        self.training = [(run.end, run.devices, run.owner, run.quotas) for run in snapshot.training]
        heapq.heapify(self.training)
        self._now = 0.0
        kinds: dict[Needs, int] = {}
        self._needs_kinds = {run.run_id: kinds.setdefault(run.needs, len(kinds)) for run in snapshot.waiting}
        self._fitting: dict[int, dict[str, tuple[int, ...]]] = {}

    def schedule(self, now: float) -> Plan:
        """Plan the runs that wait at a time, which is not before that of an earlier call."""
        self._advance(now)
        return _Round(self, now).plan()

    def start(self, assignment: Assignment) -> float:
        """Apply an assignment of the last plan; return when the run will end."""
        run, seconds = assignment.run, self.snapshot.seconds
        end = self._now + max(seconds(run, self.workers[worker_id]) for worker_id in assignment.devices)
        for worker_id, indexes in assignment.devices.items():
            for index in indexes:
                self.frees_at[worker_id][index] = end
                self.held_mb[worker_id][index] = run.needs.memory_on(self.workers[worker_id].kind)
        heapq.heappush(self.training, (end, run.needs.devices, run.owner, run.quotas))
        del self.waiting[run.run_id]
        return end

    def waiting_in_order(self) -> list[WaitingRun]:
        """Return the waiting runs in the order in which they are considered."""
        return sorted(self.waiting.values(), key=lambda run: order_key(run, self.used))

    def needs_kind(self, run: WaitingRun) -> int:
        """Return a number that runs with equal needs share; unlike the needs it costs nothing to hash."""
        return self._needs_kinds[run.run_id]

    def fitting_devices(self, run: WaitingRun) -> dict[str, tuple[int, ...]]:
        """Return the devices on which a run fits, smallest first, of each worker that has enough of them."""
        kind = self.needs_kind(run)
        if kind not in self._fitting:
            gpu_backends = self.snapshot.fleet.gpu_backends
            fitting = {
                worker_id: run.needs.fitting_devices(worker, gpu_backends) for worker_id, worker in self.workers.items()
            }
            self._fitting[kind] = {worker_id: indexes for worker_id, indexes in fitting.items() if indexes}
        return self._fitting[kind]

    def room(self) -> dict[str, int]:
        """Return the devices that each quota leaves."""
        room = dict(self.snapshot.limits)
        for _, devices, _, quotas in self.training:
            for quota in quotas:
                if quota in room:
                    room[quota] -= devices
        return room

    def _advance(self, now: float) -> None:
        """Add what runs use until a time to their owners, and forget those that have ended by then."""
        for end, devices, owner, _ in self.training:
            self.used[owner] += devices * (min(now, end) - self._now)
        while self.training and self.training[0][0] <= now:
            heapq.heappop(self.training)
        self._now = now


class _Round:
    """One pass over the queue."""

    def __init__(self, state: QueueState, now: float) -> None:
        self._state = state
        self._now = now
        self._claim = state.snapshot.claim
        self._plan = Plan()
        self._frees_at = {worker_id: list(times) for worker_id, times in state.frees_at.items()}
        self._free = {
            worker_id: {index for index, at in enumerate(times) if at <= now}
            for worker_id, times in self._frees_at.items()
        }
        self._free_count = sum(map(len, self._free.values()))
        self._room = self._plan.room
        self._room.update(state.room())
        self._worker_holds: dict[str, Hold] = {}
        self._devices_at_start: dict[str, set[int]] = {}
        """Devices that are free for the holder of a worker at its start, as far as no later run has taken them."""
        self._quota_holds = self._plan.quota_holds
        self._quota_spare: dict[str, int] = {}
        """Devices of held quotas that later runs may use however long they take, as far as none has taken them."""
        self._lacking: set[int] = set()
        """Kinds of needs for which too few devices are free; they only become fewer during a pass."""
        self._machine_mb: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Memory that runs use on the machines of CPU workers, by machine and worker."""
        for worker_id, worker in state.workers.items():
            if worker.machine is not None:
                self._machine_mb[worker.machine][worker_id] = sum(
                    mb for mb, at in zip(state.held_mb[worker_id], self._frees_at[worker_id], strict=True) if at > now
                )

    def plan(self) -> Plan:
        for run in self._state.waiting_in_order():
            may_hold = run.needs.devices > 1 and (self._claim is not None or len(self._plan.holds) < MOST_HOLDS)
            if self._free_count == 0 and not may_hold:
                continue  # neither a start nor a hold
            if run.not_before <= self._now:
                self._consider(run)
            if self._claim is not None and self._plan.assignments:
                break
        self._state.held = {hold.run.run_id: tuple(hold.devices) for hold in self._plan.holds}
        return self._plan

    def _consider(self, run: WaitingRun) -> None:
        devices = run.needs.devices
        full_quotas = [quota for quota in run.quotas if devices > self._room.get(quota, math.inf)]
        placement = self._placement(run) if run.is_ready and not full_quotas else None
        if placement is not None:
            if self._respects_quota_holds(run, placement):
                self._assign(run, placement)
        elif devices > 1 and self._respects_quota_holds(run):
            if self._claim is not None:
                self._hold_again(run, self._claim)
            elif self._is_possible(run):
                self._hold(run, full_quotas)

    def _is_possible(self, run: WaitingRun) -> bool:
        """Return True if the run could start on devices that others use now, and within its quotas."""
        limits = self._state.snapshot.limits
        if any(run.needs.devices > limits.get(quota, math.inf) for quota in run.quotas):
            return False
        return bool(self._groups(run, self._usable_devices(run)))

    def _usable_devices(self, run: WaitingRun) -> dict[str, list[int]]:
        """Return the devices on which a run fits, free or not, without paused ones; of workers with enough of them."""
        workers = self._state.workers
        usable = {
            worker_id: [index for index in indexes if not workers[worker_id].devices[index].paused]
            for worker_id, indexes in self._state.fitting_devices(run).items()
        }
        return {worker_id: indexes for worker_id, indexes in usable.items() if len(indexes) >= run.needs.devices_each}

    def _groups(self, run: WaitingRun, worker_ids: Iterable[str]) -> list[list[str]]:
        """Return the groups of workers that can train a run together, and have enough members for its hosts."""
        if run.needs.hosts == 1:
            return [[worker_id] for worker_id in worker_ids]
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for worker_id in worker_ids:
            groups[self._state.workers[worker_id].alike].append(worker_id)
        return [group for group in groups.values() if len(group) >= run.needs.hosts]

    def _placement(self, run: WaitingRun) -> dict[str, tuple[int, ...]] | None:
        """Return the free devices on which a run starts, by worker; None if there are too few."""
        needs = run.needs
        if self._state.snapshot.fleet.pause is not None:
            return None
        if self._free_count < needs.devices or self._state.needs_kind(run) in self._lacking:
            return None
        free = {
            worker_id: idle
            for worker_id, indexes in self._state.fitting_devices(run).items()
            if self._may_take(run, worker_id)
            and len(idle := [index for index in indexes if index in self._free[worker_id]]) >= needs.devices_each
        }
        if not self._groups(run, free):
            if self._claim is None:  # there, what a run on several hosts holds decides, and not only what it needs
                self._lacking.add(self._state.needs_kind(run))
            return None
        choices = {
            worker_id: chosen
            for worker_id, indexes in free.items()
            if (chosen := self._choose_devices(run, worker_id, indexes)) is not None
        }
        candidates = [
            sorted(group, key=lambda worker_id: self._preference(worker_id, choices[worker_id]))[: needs.hosts]
            for group in self._groups(run, choices)
        ]
        if not candidates:
            return None
        best = min(candidates, key=lambda group: self._preference(group[-1], choices[group[-1]]))
        if self._claim is not None:
            lead = self._claim.worker_id
            best.sort(key=lambda worker_id: (worker_id != lead, worker_id))
        return {worker_id: choices[worker_id] for worker_id in best}

    def _may_take(self, run: WaitingRun, worker_id: str) -> bool:
        """Return True if a worker takes runs now; a run on several hosts starts on the workers that it holds."""
        if self._claim is None:
            return True
        if run.needs.hosts == 1:
            return worker_id == self._claim.worker_id
        hold = self._claim.holds.get(run.run_id)
        return hold is not None and worker_id in hold.devices and self._claim.worker_id in hold.devices

    def _choose_devices(self, run: WaitingRun, worker_id: str, free: Sequence[int]) -> tuple[int, ...] | None:
        """Choose from the free devices of a worker; None if it holds them for another run, or lacks memory."""
        each, worker = run.needs.devices_each, self._state.workers[worker_id]
        if worker.machine is not None and not self._has_machine_memory(run, worker):
            return None
        hold = self._worker_holds.get(worker_id)
        if hold is None:
            return tuple(free[:each])
        at_start = self._devices_at_start[worker_id]
        chosen = sorted(free, key=lambda index: index in at_start)[:each]
        is_enough = len(at_start.difference(chosen)) >= hold.run.needs.devices_each
        return tuple(chosen) if is_enough or self._ends_by(run, worker_id, hold.start) else None

    def _has_machine_memory(self, run: WaitingRun, worker: WorkerOffer) -> bool:
        """Return True if a run fits a machine beside the runs of its other CPU workers, which all offer its memory."""
        used = self._machine_mb[worker.machine or ""]
        if not any(mb for worker_id, mb in used.items() if worker_id != worker.worker_id):
            return True
        needed = run.needs.memory_on(worker.kind) * run.needs.devices_each
        return sum(used.values()) + needed <= sum(device.memory_mb for device in worker.devices)

    def _ends_by(self, run: WaitingRun, worker_id: str, time: float) -> bool:
        end = self._now + self._state.snapshot.seconds(run, self._state.workers[worker_id])
        return end <= time < math.inf

    def _preference(self, worker_id: str, chosen: Sequence[int]) -> tuple[bool, int, bool, int, str]:
        """Return the key by which the worker of a run is chosen; the smallest is best."""
        worker = self._state.workers[worker_id]
        largest_mb = max(worker.devices[index].memory_mb for index in chosen)
        other_free = len(self._free[worker_id]) - len(chosen)
        return worker.kind != "cuda", largest_mb, worker_id in self._worker_holds, other_free, worker_id

    def _respects_quota_holds(self, run: WaitingRun, placement: Collection[str] | None = None) -> bool:
        """Return True if a run that starts, on these workers, delays no earlier run that holds a quota."""
        for quota in run.quotas:
            held = self._quota_holds.get(quota)
            if held is None or run.needs.devices <= self._quota_spare[quota]:
                continue
            if placement is None or not all(self._ends_by(run, worker_id, held.start) for worker_id in placement):
                return False
        return True

    def _assign(self, run: WaitingRun, placement: Mapping[str, tuple[int, ...]]) -> None:
        self._plan.assignments.append(Assignment(run, dict(placement)))
        self._free_count -= run.needs.devices
        workers = self._state.workers
        end = self._now + max(self._state.snapshot.seconds(run, workers[worker_id]) for worker_id in placement)
        for worker_id, indexes in placement.items():
            worker = workers[worker_id]
            self._free[worker_id].difference_update(indexes)
            for index in indexes:
                self._frees_at[worker_id][index] = end
            if worker.machine is not None:
                self._machine_mb[worker.machine][worker_id] += run.needs.memory_on(worker.kind) * len(indexes)
            hold = self._worker_holds.get(worker_id)
            if hold is not None and not end <= hold.start < math.inf:
                self._devices_at_start[worker_id].difference_update(indexes)
        for quota in run.quotas:
            if quota in self._room:
                self._room[quota] -= run.needs.devices
            quota_hold = self._quota_holds.get(quota)
            if quota_hold is not None and not end <= quota_hold.start < math.inf:
                self._quota_spare[quota] -= run.needs.devices

    def _hold(self, run: WaitingRun, full_quotas: Sequence[str]) -> None:
        """Hold workers for a run whose quotas have room, and its quotas; of another run only the full quotas."""
        hold = None if full_quotas else self._hold_workers(run)
        quotas = [quota for quota in run.quotas if quota in self._room and quota not in self._quota_holds]
        held = quotas if hold is not None else [quota for quota in quotas if quota in full_quotas]
        if not held:
            return
        start = max(self._time_of_room(quota, run.needs.devices) for quota in run.quotas if quota in self._room)
        start = max(start, hold.start if hold else 0.0)
        for quota in held:
            spare = self._room_at(quota, start) - run.needs.devices
            self._quota_holds[quota] = QuotaHold(run, start, max(spare, 0))
            self._quota_spare[quota] = max(spare, 0)

    def _hold_again(self, run: WaitingRun, claim: Claim) -> None:
        """Hold what the run held in the last plan of the whole queue."""
        if (hold := claim.holds.get(run.run_id)) is not None:
            for worker_id, indexes in hold.devices.items():
                if worker_id not in self._worker_holds:
                    self._worker_holds[worker_id] = hold
                    self._devices_at_start[worker_id] = set(indexes)
        for quota, quota_hold in claim.quota_holds.items():
            if quota_hold.run.run_id == run.run_id:
                self._quota_holds[quota] = quota_hold
                self._quota_spare[quota] = quota_hold.spare

    def _hold_workers(self, run: WaitingRun) -> Hold | None:
        """Hold the workers that are free first, or keep those that the run holds already."""
        if len(self._plan.holds) == MOST_HOLDS:
            return None
        needs = run.needs
        usable = {
            worker_id: indexes
            for worker_id, indexes in self._usable_devices(run).items()
            if worker_id not in self._worker_holds
        }
        starts = {
            worker_id: max(
                sorted(self._frees_at[worker_id][index] for index in indexes)[needs.devices_each - 1], self._now
            )
            for worker_id, indexes in usable.items()
        }
        already_held = self._state.held.get(run.run_id, ())

        def preference(worker_id: str) -> tuple[float, bool, int, str]:
            is_held = worker_id in already_held
            wait = (starts[worker_id] - self._now) * (_CLEARLY_SOONER if is_held else 1.0)
            busy = sum(self._frees_at[worker_id][index] > self._now for index in usable[worker_id])
            return wait, not is_held, busy, worker_id

        groups = [sorted(group, key=preference)[: needs.hosts] for group in self._groups(run, usable)]
        if not groups:
            return None
        chosen = min(groups, key=lambda group: preference(group[-1]))  # the worker that is free last decides
        start = max(starts[worker_id] for worker_id in chosen)
        if needs.hosts > 1 and math.isinf(start) and self._has_endless_hold():
            return None
        until = self._now if math.isinf(start) else start
        devices = {
            worker_id: frozenset(index for index in usable[worker_id] if self._frees_at[worker_id][index] <= until)
            for worker_id in chosen
        }
        hold = Hold(run, start, devices)
        self._plan.holds.append(hold)
        self._worker_holds.update(dict.fromkeys(chosen, hold))
        self._devices_at_start.update({worker_id: set(indexes) for worker_id, indexes in devices.items()})
        return hold

    def _has_endless_hold(self) -> bool:
        """Return True if a run on several hosts holds workers without a known start: one at a time does."""
        return any(hold.run.needs.hosts > 1 and math.isinf(hold.start) for hold in self._plan.holds)

    def _quota_ends(self, quota: str) -> list[tuple[float, int]]:
        """Return when runs give devices of a quota back, and how many, the first first."""
        training = [(end, devices) for end, devices, _, quotas in self._state.training if quota in quotas]
        seconds, workers = self._state.snapshot.seconds, self._state.workers
        started = [
            (self._now + max(seconds(run, workers[worker_id]) for worker_id in devices), run.needs.devices)
            for run, devices in ((assignment.run, assignment.devices) for assignment in self._plan.assignments)
            if quota in run.quotas
        ]
        return sorted(training + started)

    def _time_of_room(self, quota: str, devices: int) -> float:
        """Return when a quota has room for so many devices; infinite if unknown."""
        room = self._room[quota]
        if room >= devices:
            return self._now
        for end, freed in self._quota_ends(quota):
            room += freed
            if room >= devices:
                return end
        return math.inf

    def _room_at(self, quota: str, time: float) -> int:
        """Return the devices that a quota leaves at a time, if no further run starts; at an infinite time, now."""
        return self._room[quota] + sum(devices for end, devices in self._quota_ends(quota) if end <= time < math.inf)

"""Promises of claims between two plans of the queue, on random queues: no claim lets a holder wait longer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from app.runs.queue.fit import Fleet
from app.runs.queue.forecast import predict_starts
from app.runs.queue.holds import QuotaUse, StoredHolds
from app.runs.queue.policy import Assignment, Claim, Plan, Snapshot, TrainingRun, WaitingRun, order_key, schedule
from tests.app.runs.queue.queues import UNKNOWN, BusyWorker, in_order, snapshot, waiting, worker
from tests.app.runs.queue.test_policy import free_devices, placements, quota_use, snapshots
from tests.properties import examples

NOW = 1_800_000_000.0


def stored(queue: Snapshot) -> StoredHolds:
    """Return what the plan of a queue holds, as it is read back from the database."""
    return StoredHolds.model_validate_json(StoredHolds.of_plan(schedule(queue), queue, NOW).model_dump_json())


def claim(queue: Snapshot, holds: StoredHolds, worker_id: str, now: float = NOW) -> Assignment | None:
    """Return what a worker claims; the runs that have started since the plan are among `queue.training`."""
    holders = {run.run_id: run for run in queue.waiting if run.run_id in holds.run_ids()}
    device = {
        offered.run_id: offer.device
        for offer in queue.fleet.workers
        for offered in offer.devices
        if offered.run_id is not None
    }
    uses = [
        QuotaUse(quota, run.run_id, run.devices, device.get(run.run_id, ""))
        for run in queue.training
        for quota in run.quotas
    ]
    asking = Claim(worker_id, holds.worker_holds(queue.fleet, holders, now), holds.quota_holds_of(holders, uses, now))
    plan = schedule(replace(queue, claim=asking, seconds=holds.seconds_on))
    return plan.assignments[0] if plan.assignments else None


def started(queue: Snapshot, assignment: Assignment) -> Snapshot:
    """Return a queue in which an assignment has started."""
    run = assignment.run
    offers = {offer.worker_id: offer for offer in queue.fleet.workers}
    seconds = max(queue.seconds(run, offers[worker_id]) for worker_id in assignment.devices)
    for worker_id, indexes in assignment.devices.items():
        devices = tuple(
            replace(device, run_id=run.run_id) if index in indexes else device
            for index, device in enumerate(offers[worker_id].devices)
        )
        offers[worker_id] = replace(offers[worker_id], devices=devices)
    training = TrainingRun(run.run_id, run.needs.devices, run.owner, run.quotas, seconds)
    return replace(
        queue,
        fleet=Fleet(list(offers.values()), queue.fleet.gpu_backends),
        waiting=[other for other in queue.waiting if other.run_id != run.run_id],
        training=[*queue.training, training],
    )


@given(snapshots())
@examples(50)
def test_a_claim_takes_free_devices_of_its_worker_and_stays_within_quotas(queue: Snapshot) -> None:
    holds = stored(queue)
    for offer in queue.fleet.workers:
        assignment = claim(queue, holds, offer.worker_id)
        if assignment is None:
            continue
        run, free = assignment.run, free_devices(queue)
        in_any_order = {worker_id: tuple(sorted(indexes)) for worker_id, indexes in assignment.devices.items()}
        assert any(in_any_order == way for way in placements(queue, run, free))
        assert next(iter(assignment.devices)) == offer.worker_id, "it is the lead"
        use = quota_use(queue, Plan(assignments=[assignment]))
        assert all(use[quota] <= queue.limits.get(quota, math.inf) for quota in run.quotas)


@given(snapshots(ends=(5.0, 30.0)))
@examples(50)
def test_claims_of_all_workers_do_not_delay_the_first_run_that_holds_workers(queue: Snapshot) -> None:
    plan = schedule(queue)
    if not plan.holds:
        return
    holder = plan.holds[0].run
    if any(order_key(run, queue.used) < order_key(holder, queue.used) for run in queue.waiting):
        return  # those may start later and take its devices
    predicted = predict_starts(queue)[holder.run_id].start
    holds = stored(queue)
    for offer in queue.fleet.workers:
        while (assignment := claim(queue, holds, offer.worker_id)) is not None:
            queue = started(queue, assignment)
            if assignment.run.run_id == holder.run_id:
                return
    assert predict_starts(queue)[holder.run_id].start <= predicted


@given(snapshots())
@examples(50)
def test_the_first_run_is_claimed_by_each_worker_on_which_it_can_start(queue: Snapshot) -> None:
    due = [run for run in queue.waiting if run.not_before <= 0]
    if not due:
        return
    first = min(due, key=lambda run: order_key(run, queue.used))
    use = quota_use(queue, Plan())
    if first.needs.hosts > 1 or any(
        use[quota] + first.needs.devices > queue.limits.get(quota, math.inf) for quota in first.quotas
    ):
        return
    holds = stored(queue)
    for offer in queue.fleet.workers:
        on_worker = {(worker_id, index) for worker_id, index in free_devices(queue) if worker_id == offer.worker_id}
        assignment = claim(queue, holds, offer.worker_id)
        is_first = assignment is not None and assignment.run.run_id == first.run_id
        assert is_first == bool(placements(queue, first, on_worker))


def wide_and(*runs: WaitingRun, devices: int = 2) -> list[WaitingRun]:
    return in_order([waiting("wide", devices=devices), *runs])


@pytest.mark.parametrize(("seconds", "later", "starts"), [(50.0, 5.0, True), (50.0, 20.0, False), (UNKNOWN, 0, False)])
def test_a_later_run_is_claimed_only_while_it_still_ends_before_the_holder_can_start(
    seconds: float, later: float, starts: bool
) -> None:
    queue = snapshot([worker(0, 60)], wide_and(waiting("small")), {"small": seconds})
    assert (claim(queue, stored(queue), "w", NOW + later) is not None) is starts


@pytest.mark.parametrize(("seconds", "claims"), [(1000.0, ["a"]), (50.0, ["a", "b"])])
def test_what_has_started_since_the_plan_counts_among_the_devices_that_the_holder_leaves(
    seconds: float, claims: list[str]
) -> None:
    queue = snapshot([worker(0, 0, 60, 60)], wide_and(waiting("a"), waiting("b"), devices=3), lambda *_: seconds)
    holds, claimed = stored(queue), []
    while (assignment := claim(queue, holds, "w")) is not None:
        claimed.append(assignment.run.run_id)
        queue = started(queue, assignment)
    assert claimed == claims


def test_what_has_started_since_the_plan_counts_among_the_devices_of_a_quota() -> None:
    quotas: dict[str, Any] = {"quotas": ("key",)}
    runs = in_order([waiting("wide", devices=3, **quotas), waiting("a", **quotas), waiting("b", **quotas)])
    training = [TrainingRun("r", 2, quotas=("key",), end=60.0)]
    queue = snapshot([worker(0, 0, 0, 0)], runs, lambda *_: 1000, training, limits={"key": 4})
    holds = stored(queue)
    assignment = claim(queue, holds, "w")
    assert assignment is not None and assignment.run.run_id == "a"
    assert claim(started(queue, assignment), holds, "w") is None


def test_a_run_that_the_plan_starts_before_the_holder_takes_nothing_of_what_the_holder_leaves_of_a_quota() -> None:
    quotas: dict[str, Any] = {"quotas": ("key",)}
    runs = [waiting("first", **quotas), waiting("wide", devices=5, **quotas)]
    runs += [waiting(run_id, **quotas) for run_id in ("a", "b")]
    training = [TrainingRun("r", 2, quotas=("key",), end=60.0)]
    queue = snapshot([worker(*[0] * 7)], in_order(runs), lambda *_: 1000, training, limits={"key": 7})
    holds, claimed = stored(queue), []
    while (assignment := claim(queue, holds, "w")) is not None:
        claimed.append(assignment.run.run_id)
        queue = started(queue, assignment)
    assert claimed == ["first", "a"], "seven less five leave one device beside that of the first run"


def hosts(*names: str) -> Sequence[BusyWorker]:
    return [worker(0, worker_id=name, joins_hosts=True) for name in names]


def test_a_run_on_several_hosts_starts_only_on_workers_that_it_holds_and_one_of_them_leads_it() -> None:
    queue = snapshot(hosts("u", "v"), [waiting("group", devices=2, hosts=2)])
    holds = stored(queue)
    queue = replace(queue, fleet=Fleet([*queue.fleet.workers, *(busy.offer for busy in hosts("w"))]))
    assert claim(queue, holds, "w") is None
    for lead, other in (("u", "v"), ("v", "u")):
        assignment = claim(queue, holds, lead)
        assert assignment is not None and list(assignment.devices) == [lead, other]
    assert claim(queue, StoredHolds(), "u") is None


def test_a_run_of_which_an_attempt_may_still_have_processes_holds_its_workers_and_does_not_start() -> None:
    group = replace(waiting("group", devices=2, hosts=2), is_ready=False)
    queue = snapshot(hosts("u", "v"), in_order([group, waiting("small")]), lambda *_: UNKNOWN)
    assert claim(queue, stored(queue), "u") is None
    assert schedule(queue).assignments == []

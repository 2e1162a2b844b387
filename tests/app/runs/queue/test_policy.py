"""Promises of the queue's policy on random queues: what starts now, what is held, and that nothing starves."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runs.queue.forecast import predict_starts
from app.runs.queue.policy import MOST_HOLDS, Plan, Snapshot, TrainingRun, WaitingRun, order_key, schedule
from tests.app.runs.queue.queues import UNKNOWN, BusyWorker, in_order, snapshot, waiting, worker
from tests.properties import examples

_MEMORY_MB = (10_000, 20_000)
_QUOTAS = ("key-a", "key-b", "exp-x")


@st.composite
def workers(draw: st.DrawFn, ends: tuple[float, ...]) -> list[BusyWorker]:
    offers = []
    for at in range(draw(st.integers(1, 4))):
        frees_at = draw(st.lists(st.sampled_from((0.0, *ends)), min_size=1, max_size=3))
        memory_mb = [draw(st.sampled_from(_MEMORY_MB)) for _ in frees_at]
        change = {"device": draw(st.sampled_from(("H100", "A10"))), "joins_hosts": draw(st.booleans())}
        busy = worker(*frees_at, worker_id=f"w{at}", memory_mb=memory_mb, **change)
        paused = draw(st.integers(0, 9))  # of ten workers, nine have no paused device
        devices = tuple(
            replace(device, paused=paused == 9 and index == 0) for index, device in enumerate(busy.offer.devices)
        )
        offers.append(replace(busy, offer=replace(busy.offer, devices=devices)))
    return offers


@st.composite
def snapshots(draw: st.DrawFn, ends: tuple[float, ...] = (5.0, 30.0, UNKNOWN)) -> Snapshot:
    fleet = draw(workers(ends))
    runs = []
    for at in range(draw(st.integers(0, 7))):
        hosts = draw(st.sampled_from((1, 1, 1, 2)))
        owner = draw(st.sampled_from("ab"))
        needs = {"memory_mb": draw(st.sampled_from(_MEMORY_MB)), "hosts": hosts}
        quotas = (f"key-{owner}", *draw(st.sampled_from(((), ("exp-x",)))))
        runs.append(
            waiting(
                f"run{at}",
                priority=draw(st.integers(0, 1)),
                owner=owner,
                quotas=quotas,
                not_before=draw(st.sampled_from((0.0, 0.0, 0.0, 7.0))),
                devices=hosts * draw(st.integers(1, 2)),
                **needs,
            )
        )
    limits = draw(st.dictionaries(st.sampled_from(_QUOTAS), st.integers(0, 4)))
    seconds = {run.run_id: draw(st.sampled_from((1.0, 10.0, 40.0, *ends[2:]))) for run in runs}
    training = [replace(run, quotas=(f"key-{draw(st.sampled_from('ab'))}",)) for busy in fleet for run in busy.training]
    fleet = [replace(busy, training=()) for busy in fleet]
    used = {"a": draw(st.sampled_from((0.0, 100.0))), "b": 50.0}
    return snapshot(fleet, runs, seconds, training, used=used, limits=limits)


def free_devices(queue: Snapshot) -> set[tuple[str, int]]:
    return {
        (offer.worker_id, index)
        for offer in queue.fleet.workers
        for index, device in enumerate(offer.devices)
        if device.run_id is None and not device.paused
    }


def assigned_devices(plan: Plan) -> list[tuple[str, int]]:
    return [
        (worker_id, index)
        for assignment in plan.assignments
        for worker_id, indexes in assignment.devices.items()
        for index in indexes
    ]


def quota_use(queue: Snapshot, plan: Plan) -> Counter[str]:
    use: Counter[str] = Counter()
    for training in queue.training:
        use.update(dict.fromkeys(training.quotas, training.devices))
    for assignment in plan.assignments:
        use.update(dict.fromkeys(assignment.run.quotas, assignment.run.needs.devices))
    return use


def placements(queue: Snapshot, run: WaitingRun, free: set[tuple[str, int]]) -> list[dict[str, tuple[int, ...]]]:
    """Return every way to start a run on free devices, found by trying all."""
    choices: dict[tuple[str, str], dict[str, list[tuple[int, ...]]]] = defaultdict(dict)
    for offer in queue.fleet.workers:
        fitting = [
            index
            for index, device in enumerate(offer.devices)
            if (offer.worker_id, index) in free and device.memory_mb >= run.needs.memory_on(offer.kind)
        ]
        if run.needs.hosts == 1 or offer.joins_hosts:
            ways = list(combinations(fitting, run.needs.devices_each))
            if ways:
                choices[offer.alike if run.needs.hosts > 1 else ("", "")][offer.worker_id] = ways
    return [
        dict(zip(group, ways, strict=True))
        for by_worker in choices.values()
        for group in combinations(by_worker, run.needs.hosts)
        for ways in product(*(by_worker[worker_id] for worker_id in group))
    ]


@given(snapshots())
@examples(50)
def test_a_plan_gives_each_free_device_once_and_whole_runs_within_their_quotas(queue: Snapshot) -> None:
    plan = schedule(queue)
    devices, free = assigned_devices(plan), free_devices(queue)
    assert len(devices) == len(set(devices)) and set(devices) <= free
    for assignment in plan.assignments:
        run = assignment.run
        assert run.not_before <= 0
        in_any_order = {worker_id: tuple(sorted(indexes)) for worker_id, indexes in assignment.devices.items()}
        assert any(in_any_order == way for way in placements(queue, run, free)), "it fits, on each of its hosts alike"
    for quota, devices_used in (quota_use(queue, plan) - quota_use(queue, Plan())).items():
        assert quota_use(queue, plan)[quota] <= queue.limits.get(quota, math.inf), f"{devices_used} more of {quota}"


@given(snapshots())
@examples(50)
def test_a_run_that_could_start_waits_only_for_devices_or_quotas_held_for_an_earlier_one(queue: Snapshot) -> None:
    plan = schedule(queue)
    started = {assignment.run.run_id for assignment in plan.assignments}
    free = free_devices(queue) - set(assigned_devices(plan))
    for run in queue.waiting:
        has_quota = all(run.needs.devices <= plan.room.get(quota, math.inf) for quota in run.quotas)
        if run.run_id in started or run.not_before > 0 or not has_quota:
            continue
        earlier_holders = [hold.run for hold in plan.holds] + [hold.run for hold in plan.quota_holds.values()]
        is_behind = any(order_key(holder, queue.used) < order_key(run, queue.used) for holder in earlier_holders)
        assert not placements(queue, run, free) or is_behind


@given(snapshots())
@examples(50)
def test_the_first_run_starts_whenever_it_can(queue: Snapshot) -> None:
    due = [run for run in queue.waiting if run.not_before <= 0]
    if not due:
        return
    first = min(due, key=lambda run: order_key(run, queue.used))
    use = quota_use(queue, Plan())
    has_quota = all(use[quota] + first.needs.devices <= queue.limits.get(quota, math.inf) for quota in first.quotas)
    can_start = has_quota and bool(placements(queue, first, free_devices(queue)))
    assert (first.run_id in {assignment.run.run_id for assignment in schedule(queue).assignments}) == can_start


@given(snapshots(ends=(5.0, 30.0)))
@examples(50)
def test_later_runs_never_delay_the_first_run_that_holds_workers(queue: Snapshot) -> None:
    plan = schedule(queue)
    if not plan.holds:
        return
    hold = plan.holds[0]
    priority = max(run.priority for run in queue.waiting) + 1
    alone = [replace(run, priority=priority) for run in queue.waiting if run.run_id == hold.run.run_id]
    before = [run for run in queue.waiting if order_key(run, queue.used) < order_key(hold.run, queue.used)]
    if before:
        return  # those may start later and take its devices
    assert (
        predict_starts(queue)[hold.run.run_id].start
        <= predict_starts(replace(queue, waiting=alone))[hold.run.run_id].start
    )


@given(snapshots(ends=(5.0, 30.0)))
@examples(50)
def test_no_run_that_fits_the_fleet_and_its_quotas_starves(queue: Snapshot) -> None:
    starts = predict_starts(queue)
    usable = {
        (offer.worker_id, index)
        for offer in queue.fleet.workers
        for index, device in enumerate(offer.devices)
        if not device.paused
    }
    for run in queue.waiting:
        is_allowed = all(run.needs.devices <= queue.limits.get(quota, math.inf) for quota in run.quotas)
        is_possible = is_allowed and bool(placements(queue, run, usable))
        assert (starts[run.run_id].start < math.inf) == is_possible


@given(snapshots(), st.data())
@examples(25)
def test_a_plan_does_not_depend_on_the_order_in_which_runs_and_workers_are_read(queue: Snapshot, data: Any) -> None:
    shuffled = replace(
        queue,
        waiting=data.draw(st.permutations(list(queue.waiting))),
        fleet=replace(queue.fleet, workers=data.draw(st.permutations(list(queue.fleet.workers)))),
    )
    starts = {assignment.run.run_id: assignment.devices for assignment in schedule(queue).assignments}
    assert {assignment.run.run_id: assignment.devices for assignment in schedule(shuffled).assignments} == starts


class TestHolds:
    def test_at_most_three_runs_keep_workers_idle(self) -> None:
        busy = [worker(0, 60, worker_id=f"w{at}") for at in range(5)]
        runs = in_order([waiting(f"wide{at}", devices=2) for at in range(4)] + [waiting("small")])
        plan = schedule(snapshot(busy, runs, lambda *_: 100))
        assert [hold.run.run_id for hold in plan.holds] == ["wide0", "wide1", "wide2"][:MOST_HOLDS]
        assert [assignment.run.run_id for assignment in plan.assignments] == ["small"]

    def test_a_run_holds_the_worker_whose_devices_are_free_first_unless_it_holds_another(self) -> None:
        busy = [worker(0, 50, worker_id="v"), worker(0, 48, worker_id="w")]
        for held, worker_id in (({}, "w"), ({"a": ["v"]}, "v")):
            (hold,) = schedule(snapshot(busy, [waiting(devices=2)], held=held)).holds
            assert list(hold.devices) == [worker_id]
        busy[1] = worker(0, 30, worker_id="w")
        moved = schedule(snapshot(busy, [waiting(devices=2)], held={"a": ["v"]}))
        assert list(moved.holds[0].devices) == ["w"], "it is free clearly sooner"

    def test_only_one_run_on_several_hosts_without_a_known_start_holds_workers(self) -> None:
        busy = [worker(UNKNOWN, worker_id=f"w{at}", joins_hosts=True) for at in range(4)]
        runs = in_order([waiting("first", devices=2, hosts=2), waiting("second", devices=2, hosts=2)])
        assert [hold.run.run_id for hold in schedule(snapshot(busy, runs)).holds] == ["first"]

    def test_a_device_that_the_holder_cannot_use_is_free_for_others(self) -> None:
        mixed = worker(0, 60, 0, memory_mb=(80_000, 80_000, 10_000))
        runs = in_order([waiting("wide", devices=2, memory_mb=70_000), waiting("small")])
        plan = schedule(snapshot([mixed], runs, lambda *_: 1000))
        assert [(one.run.run_id, one.devices) for one in plan.assignments] == [("small", {"w": (2,)})]

    @pytest.mark.parametrize(("seconds", "starts"), [(50.0, True), (70.0, False), (UNKNOWN, False)])
    def test_a_later_run_uses_a_held_device_only_if_it_ends_in_time(self, seconds: float, starts: bool) -> None:
        runs = in_order([waiting("wide", devices=2), waiting("small")])
        plan = schedule(snapshot([worker(0, 60)], runs, {"small": seconds}))
        assert bool(plan.assignments) is starts

    def test_the_devices_that_a_holder_leaves_are_given_once(self) -> None:
        runs = in_order([waiting("wide", devices=3), waiting("a"), waiting("b")])
        plan = schedule(snapshot([worker(0, 0, 60, 60)], runs, lambda *_: 1000))
        assert [assignment.run.run_id for assignment in plan.assignments] == ["a"]

    def test_the_devices_that_the_holder_of_a_quota_leaves_are_given_once(self) -> None:
        training = [TrainingRun("r", 2, quotas=("key",), end=60.0)]
        runs = in_order(
            [waiting("wide", devices=3, quotas=("key",)), *(waiting(name, quotas=("key",)) for name in "ab")]
        )
        queue = snapshot([worker(0, 0, 0, 0)], runs, lambda *_: 1000, training, limits={"key": 4})
        assert [assignment.run.run_id for assignment in schedule(queue).assignments] == ["a"]


class TestMachineMemory:
    def test_workers_of_one_machine_do_not_together_use_more_than_its_memory(self) -> None:
        change = {"kind": "cpu", "memory_mb": (16_000,), "machine": "boot"}
        workers = [worker(0, worker_id=f"w{at}", **change) for at in range(2)]
        runs = in_order([waiting("a", memory_mb=9000), waiting("b", memory_mb=9000), waiting("c", memory_mb=7000)])
        plan = schedule(snapshot(workers, runs))
        assert [assignment.run.run_id for assignment in plan.assignments] == ["a", "c"]
        assert predict_starts(snapshot(workers, runs))["b"].start == 10

    def test_a_run_alone_on_its_machine_may_use_what_its_own_worker_offers(self) -> None:
        lone = worker(0, 0, kind="cpu", memory_mb=(16_000, 16_000), machine="boot")
        runs = in_order([waiting("a", memory_mb=16_000), waiting("b", memory_mb=16_000)])
        assert len(schedule(snapshot([lone], runs)).assignments) == 2


def test_a_run_that_trains_counts_for_its_quota() -> None:
    training = [TrainingRun("r", 2, quotas=("key",), end=9.0)]
    runs = [waiting(quotas=("key",))]
    assert schedule(snapshot([worker(0)], runs, training=training, limits={"key": 2})).assignments == []
    assert len(schedule(snapshot([worker(0)], runs, training=training, limits={"key": 3})).assignments) == 1

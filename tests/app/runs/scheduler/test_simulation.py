"""Predicted starts of pending runs on made-up workers, in the order in which they would be claimed."""

import math
import time
from dataclasses import replace

import pytest

from app.runs.scheduler.placement import DeviceOffer, Needs, RunningRun, WorkerOffer
from app.runs.scheduler.reservations import PendingRun
from app.runs.scheduler.simulation import WorkerSlots, simulate_queue


def waiting(run_id: str = "a", not_before: float = 0.0, **needs: object) -> PendingRun:
    return PendingRun(run_id, replace(Needs("celery"), **needs), not_before)  # type: ignore[arg-type]


def ordered(queue: list[PendingRun]) -> list[PendingRun]:
    """Give runs priorities by which they are claimed in this order."""
    return [replace(run, priority=-place) for place, run in enumerate(queue)]


def slots(*free: float, memory_mb: int | tuple[int, ...] = 80_000, **change: object) -> WorkerSlots:
    """Return a worker with a device per number: the seconds until it is free."""
    memory = memory_mb if isinstance(memory_mb, tuple) else (memory_mb,) * len(free)
    devices = tuple(DeviceOffer(one) for one in memory)
    offer = WorkerOffer("w", frozenset({"celery"}), "cuda", "H100", devices)
    return WorkerSlots(replace(offer, **change), free)  # type: ignore[arg-type]


def starts(workers: list[WorkerSlots], queue: list[PendingRun], **seconds: float) -> dict[str, float]:
    """Return the start of each run; those without a given duration take 10 s."""
    found = simulate_queue(workers, ordered(queue), lambda one, _: seconds.get(one.run_id, 10.0))
    assert found.keys() == {one.run_id for one in queue}
    return {id: one.start for id, one in found.items()}


def test_each_takes_the_first_device_that_comes_free_after_those_before_it() -> None:
    queue = [waiting(name) for name in "abcd"]
    assert starts([slots(0.0, 100.0)], queue, a=50.0, b=300.0) == {"a": 0.0, "b": 50.0, "c": 100.0, "d": 110.0}


def test_several_devices_have_to_be_free_on_one_worker() -> None:
    workers = [slots(0.0, worker_id="v"), slots(30.0, 70.0)]
    assert starts(workers, [waiting(devices=2)]) == {"a": 70.0}
    assert simulate_queue(workers, [waiting(devices=3)], lambda *_: 1.0)["a"].worker is None


def test_a_run_on_several_hosts_starts_when_all_of_them_are_free_and_takes_the_devices_of_each() -> None:
    workers = [slots(at, worker_id=name, joins_hosts=True) for at, name in ((10.0, "u"), (30.0, "v"), (90.0, "w"))]
    queue = [waiting("wide", devices=2, hosts=2), waiting("next")]
    assert starts(workers, queue, wide=25.0, next=30.0) == {"wide": 30.0, "next": 55.0}, "not at 10 s, and so before it"
    assert starts(workers, queue, wide=25.0, next=20.0) == {"wide": 30.0, "next": 10.0}, "it ends in time"
    assert starts([slots(0.0, 0.0), *workers[:1]], queue) == {"wide": math.inf, "next": 0.0}


def test_a_run_that_needs_several_devices_is_preceded_only_by_later_ones_that_end_in_time() -> None:
    queue = [waiting("wide", devices=2), waiting("long"), waiting("short")]
    # A device is free at once, the other in 20 s.
    found = starts([slots(0.0, 20.0)], queue, short=10.0, long=50.0, wide=5.0)
    assert found == {"short": 0.0, "wide": 20.0, "long": 25.0}
    assert starts([slots(0.0, 20.0, 20.0)], queue, short=10.0, long=50.0)["long"] == 0.0, "enough devices remain"
    assert starts([slots(0.0, 20.0)], [waiting("first"), *queue], first=99.0)["first"] == 0.0


def test_a_worker_that_is_reserved_already_is_kept() -> None:
    workers = [slots(50.0, 50.0, worker_id="v"), slots(30.0, 48.0)]
    found = {
        held: simulate_queue(
            workers, ordered([waiting("wide", devices=2), waiting("small")]), lambda *_: 60.0, reserved=by
        )
        for held, by in (("none", {}), ("v", {"wide": ["v"]}))
    }
    assert {held: one["small"].start for held, one in found.items()} == {"none": 50.0, "v": 30.0}


def test_a_worker_passes_over_what_does_not_fit_it() -> None:
    workers = [slots(0.0, worker_id="small", memory_mb=1000), slots(40.0, worker_id="large")]
    assert starts(workers, [waiting("big", memory_mb=9000), waiting("b")]) == {"big": 40.0, "b": 0.0}


def test_a_run_takes_the_smallest_device_so_that_a_larger_run_does_not_wait() -> None:
    queue = [waiting("small", memory_mb=1000), waiting("big", memory_mb=70_000)]
    assert starts([slots(0.0, 0.0, memory_mb=(80_000, 24_000))], queue) == {"small": 0.0, "big": 0.0}


def test_a_run_that_prefers_a_gpu_waits_for_one_only_where_its_backend_has_any() -> None:
    workers = [slots(0.0, kind="cpu"), slots(30.0, worker_id="gpu")]
    for gpu_backends, start in ((frozenset({"celery"}), 30.0), (frozenset[str](), 0.0)):
        found = simulate_queue(workers, [waiting("prefers", prefers_gpu=True)], lambda *_: 1.0, gpu_backends)
        assert found["prefers"].start == start


@pytest.mark.parametrize(
    "change", [{"kind": "cpu"}, {"backend": "fake"}, {"memory_mb": 90_000}, {"devices": 2}], ids=str
)
def test_what_no_worker_could_take_has_no_worker_and_delays_no_other_run(change: dict[str, object]) -> None:
    found = simulate_queue([slots(0.0)], [waiting("never", **change), waiting("b")], lambda *_: 1.0)
    assert found["never"].worker is None and found["b"].start == 0.0


def test_before_a_run_are_those_that_start_first_where_it_could_itself() -> None:
    workers = [slots(0.0, 5.0), slots(0.0, worker_id="cpu", kind="cpu")]
    queue = [
        waiting("never", memory_mb=90_000), waiting("wide", kind="cuda", devices=2), waiting("a", kind="cuda"),
        waiting("b", kind="cuda"), waiting("cpu", kind="cpu"), waiting("c", kind="cuda"), waiting("any"),
    ]  # fmt: skip
    found = simulate_queue(workers, ordered(queue), lambda *_: 20.0)
    assert {id: one.before for id, one in found.items()} == {
        "never": 0, "wide": 0, "cpu": 0, "a": 1, "b": 2, "c": 3, "any": 2,
    }  # fmt: skip
    unknown = simulate_queue([slots(math.inf)], [waiting("a"), waiting("b", kind="cuda")], lambda *_: 20.0)
    assert [unknown[id].before for id in "ab"] == [0, 1]


def test_a_pause_is_waited_out_by_who_has_it_alone_and_what_no_one_knows_is_not_guessed() -> None:
    assert starts([slots(0.0)], [waiting("a", not_before=20.0), waiting("b")]) == {"a": 20.0, "b": 0.0}
    found = simulate_queue([slots(math.inf)], [waiting()], lambda *_: 1.0)["a"]
    assert found.worker is not None and math.isinf(found.start)
    assert starts([slots(0.0)], [waiting("a"), waiting("b")], a=math.inf) == {"a": 0.0, "b": math.inf}


class TestOwners:
    def test_share_devices_by_what_they_have_used(self) -> None:
        queue = [replace(waiting(name), owner=name[0]) for name in ("a1", "a2", "a3", "b1", "b2")]
        found = simulate_queue([slots(0.0)], queue, lambda *_: 10.0, used={"a": 5.0, "b": 0.0})
        assert [found[name].start for name in ("b1", "a1", "b2", "a2", "a3")] == [0.0, 10.0, 20.0, 30.0, 40.0]

    def test_what_runs_now_counts_until_it_ends(self) -> None:
        queue = [replace(waiting(name), owner=name[0]) for name in ("a1", "b1")]
        running = [RunningRun("run_a", 0, "a", 2, 0.0, 10.0), RunningRun("run_b", 0, "b", 1, 0.0, 30.0)]
        for start, first in ((15.0, "b1"), (25.0, "a1")):
            found = simulate_queue([slots(start)], queue, lambda *_: 10.0, running=running)
            assert found[first].start == start, "until then, the first has used 20 and the second as long as it ran"

    def test_a_higher_priority_comes_before_any_share(self) -> None:
        queue = [replace(waiting("a1"), owner="a", priority=1), replace(waiting("b1"), owner="b")]
        found = simulate_queue([slots(0.0)], queue, lambda *_: 10.0, used={"a": 1e9})
        assert found["a1"].start == 0.0


class TestQuotas:
    def limited(self, run_id: str, *quotas: str, **needs: object) -> PendingRun:
        return replace(waiting(run_id, **needs), owner=quotas[0], quotas=quotas)

    def starts(self, queue: list[PendingRun], rooms: dict[str, int], *free: float, **seconds: float) -> list[float]:
        """Return the start of each run, in the order of their ids."""
        running = [RunningRun("r", 0, "key", 1, 0.0, 30.0, ("key", "exp")), RunningRun("s", 0, "other", 1, 0.0, 5.0)]
        found = simulate_queue(
            [slots(*free)], queue, lambda one, _: seconds.get(one.run_id, 10.0), running=running, rooms=rooms
        )
        return [found[run_id].start for run_id in sorted(found)]

    def test_keep_runs_waiting_while_devices_are_free(self) -> None:
        queue = [self.limited(name, "key") for name in "abc"]
        assert self.starts(queue, {}, 0.0, 0.0, 0.0) == [0.0, 0.0, 0.0]
        assert self.starts(queue, {"key": 2}, 0.0, 0.0, 0.0, a=7.0) == [0.0, 0.0, 7.0]
        assert self.starts(queue[:2], {"key": 1}, 0.0, 0.0, a=math.inf) == [0.0, 30.0]

    def test_have_room_again_when_a_run_that_trains_has_ended(self) -> None:
        queue = [self.limited("a", "key"), self.limited("b", "free"), self.limited("c", "free", "exp")]
        assert self.starts(queue, {"key": 0, "exp": 0}, 0.0, 0.0, 0.0) == [30.0, 0.0, 30.0]

    def test_that_are_too_small_keep_no_device_for_a_run(self) -> None:
        queue = [self.limited("a", "key", devices=2), self.limited("b", "free")]
        assert self.starts(queue, {"key": 0}, 0.0, 0.0) == [math.inf, 0.0]
        assert self.starts(queue, {"key": 1}, 0.0, 0.0, b=50.0) == [50.0, 0.0]

    def test_of_full_experiments_cost_little_time(self) -> None:
        workers = [slots(*[0.0] * 8, worker_id=f"w{at:03}") for at in range(200)]
        queue = [self.limited(f"run{at:03}", f"key{at % 20}", f"exp{at % 2}") for at in range(1000)]
        queue = [replace(run, not_before=float(at % 50)) for at, run in enumerate(queue)]
        began = time.process_time()
        found = simulate_queue(workers, queue, lambda *_: 100.0, rooms={"exp0": 10, "exp1": 10})
        assert time.process_time() - began < 8
        assert max(one.start for one in found.values()) == pytest.approx(4900, abs=100)


def test_a_queue_of_runs_on_several_devices_is_predicted_in_time_for_200_workers() -> None:
    """Predictions are given up after ten seconds, and each such start lets every worker be looked at again."""
    workers = [slots(*[float(at % 50)] * 8, worker_id=f"w{at:03}") for at in range(200)]
    queue = [replace(waiting(f"run{at:03}", devices=1 + at % 2), owner=f"key{at % 20}") for at in range(1000)]
    began = time.process_time()
    found = simulate_queue(workers, queue, lambda *_: 100.0)
    assert time.process_time() - began < 8
    assert all(one.start < math.inf for one in found.values())

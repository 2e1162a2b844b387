"""Predicted starts of pending runs on made-up workers."""

import math
import time

import pytest

from app.runs.queue.forecast import predict_starts
from app.runs.queue.policy import TrainingRun, WaitingRun
from tests.app.runs.queue.queues import UNKNOWN, BusyWorker, in_order, snapshot, waiting, worker


def starts(workers: list[BusyWorker], runs: list[WaitingRun], **seconds: float) -> dict[str, float]:
    """Return the start of each run; the runs are considered in this order."""
    predicted = predict_starts(snapshot(workers, in_order(runs), seconds))
    assert predicted.keys() == {run.run_id for run in runs}
    return {run_id: start.start for run_id, start in predicted.items()}


def test_each_run_takes_the_first_device_that_becomes_free_after_those_before_it() -> None:
    runs = [waiting(name) for name in "abcd"]
    assert starts([worker(0, 100)], runs, a=50, b=300) == {"a": 0, "b": 50, "c": 100, "d": 110}


def test_a_run_on_several_devices_starts_when_enough_are_free_on_one_worker() -> None:
    workers = [worker(0, worker_id="v"), worker(30, 70)]
    assert starts(workers, [waiting(devices=2)]) == {"a": 70}
    assert predict_starts(snapshot(workers, [waiting(devices=3)]))["a"].worker is None


def test_a_run_on_several_hosts_starts_when_all_are_free_and_takes_the_devices_of_each() -> None:
    workers = [worker(at, worker_id=name, joins_hosts=True) for at, name in ((10, "u"), (30, "v"), (90, "w"))]
    runs = [waiting("wide", devices=2, hosts=2), waiting("next")]
    assert starts(workers, runs, wide=25, next=30) == {"wide": 30, "next": 55}, "not at 10 s, and so before it"
    assert starts(workers, runs, wide=25, next=20) == {"wide": 30, "next": 10}, "it ends in time"
    assert starts([worker(0, 0, worker_id="single"), *workers[:1]], runs) == {"wide": math.inf, "next": 0}


def test_a_run_on_several_devices_is_preceded_only_by_later_ones_that_end_in_time() -> None:
    runs = [waiting("wide", devices=2), waiting("long"), waiting("short")]
    assert starts([worker(0, 20)], runs, short=10, long=50, wide=5) == {"short": 0, "wide": 20, "long": 25}
    assert starts([worker(0, 20, 20)], runs, short=10, long=50)["long"] == 0, "enough devices remain"
    assert starts([worker(0, 20)], [waiting("first"), *runs], first=99)["first"] == 0


def test_a_run_keeps_the_worker_that_it_holds_unless_another_is_free_clearly_sooner() -> None:
    workers = [worker(50, 50, worker_id="v"), worker(30, 48)]
    runs = in_order([waiting("wide", devices=2), waiting("small")])
    small = {
        holder: predict_starts(snapshot(workers, runs, lambda *_: 60, held=held))["small"].start
        for holder, held in (("none", {}), ("v", {"wide": ["v"]}))
    }
    assert small == {"none": 50, "v": 30}


def test_a_worker_takes_a_later_run_where_an_earlier_one_does_not_fit() -> None:
    workers = [worker(0, worker_id="small", memory_mb=1000), worker(40, worker_id="large")]
    assert starts(workers, [waiting("big", memory_mb=9000), waiting("b")]) == {"big": 40, "b": 0}


def test_a_run_takes_the_smallest_device_so_that_a_larger_run_does_not_wait() -> None:
    runs = [waiting("small", memory_mb=1000), waiting("big", memory_mb=70_000)]
    assert starts([worker(0, 0, memory_mb=(80_000, 24_000))], runs) == {"small": 0, "big": 0}
    apart = [worker(0, worker_id="large"), worker(0, worker_id="little", memory_mb=24_000)]
    assert starts(apart, runs) == {"small": 0, "big": 0}, "also on another worker"


def test_a_small_run_leaves_the_worker_with_more_free_devices_to_a_run_on_several() -> None:
    workers = [worker(0, 0, worker_id="pair"), worker(0, worker_id="single")]
    assert starts(workers, [waiting("small"), waiting("wide", devices=2)]) == {"small": 0, "wide": 0}


def test_a_run_that_prefers_a_gpu_waits_for_one_only_where_its_backend_has_any() -> None:
    workers = [worker(0, kind="cpu", worker_id="cpu"), worker(30, worker_id="gpu")]
    for gpu_backends, start in ((frozenset({"celery"}), 30), (frozenset[str](), 0)):
        runs = [waiting("prefers", prefers_gpu=True)]
        assert predict_starts(snapshot(workers, runs, gpu_backends=gpu_backends))["prefers"].start == start


@pytest.mark.parametrize(
    "change", [{"kind": "cpu"}, {"backend": "fake"}, {"memory_mb": 90_000}, {"devices": 2}], ids=str
)
def test_a_run_that_no_worker_could_take_has_no_worker_and_delays_no_other_run(change: dict[str, object]) -> None:
    predicted = predict_starts(snapshot([worker(0)], [waiting("never", **change), waiting("z")]))
    assert predicted["never"].worker is None and predicted["z"].start == 0


def test_runs_before_a_run_are_those_that_start_first_on_workers_that_fit_it() -> None:
    workers = [worker(0, 5), worker(0, worker_id="cpu", kind="cpu")]
    runs = [
        waiting("never", memory_mb=90_000), waiting("wide", kind="cuda", devices=2), waiting("a", kind="cuda"),
        waiting("b", kind="cuda"), waiting("cpu", kind="cpu"), waiting("c", kind="cuda"), waiting("any"),
    ]  # fmt: skip
    predicted = predict_starts(snapshot(workers, in_order(runs), lambda *_: 20))
    assert {run_id: start.runs_before for run_id, start in predicted.items()} == {
        "never": 0, "wide": 0, "cpu": 0, "a": 1, "b": 2, "c": 3, "any": 2,
    }  # fmt: skip
    unknown = predict_starts(snapshot([worker(UNKNOWN)], [waiting("a"), waiting("b", kind="cuda")]))
    assert [unknown[run_id].runs_before for run_id in "ab"] == [0, 1]


def test_a_paused_run_alone_waits_for_its_pause_and_an_unknown_end_is_not_guessed() -> None:
    assert starts([worker(0)], [waiting("a", not_before=20.0), waiting("b")]) == {"a": 20, "b": 0}
    predicted = predict_starts(snapshot([worker(UNKNOWN)], [waiting()]))["a"]
    assert predicted.worker is not None and math.isinf(predicted.start)
    assert starts([worker(0)], [waiting("a"), waiting("b")], a=UNKNOWN) == {"a": 0, "b": UNKNOWN}


class TestOwners:
    def test_share_devices_by_what_they_have_used(self) -> None:
        runs = [waiting(name, owner=name[0]) for name in ("a1", "a2", "a3", "b1", "b2")]
        predicted = predict_starts(snapshot([worker(0)], runs, used={"a": 5.0, "b": 0.0}))
        assert [predicted[name].start for name in ("b1", "a1", "b2", "a2", "a3")] == [0, 10, 20, 30, 40]

    @pytest.mark.parametrize(("start", "first"), [(15.0, "b1"), (25.0, "a1")])
    def test_usage_of_a_run_that_trains_counts_until_its_end(self, start: float, first: str) -> None:
        """At 15 s the first has used 20 device-seconds and the second 15; at 25 s, 20 and 25."""
        runs = [waiting(name, owner=name[0]) for name in ("a1", "b1")]
        training = [TrainingRun("run_a", 2, "a", end=10.0), TrainingRun("run_b", 1, "b", end=30.0)]
        assert predict_starts(snapshot([worker(start)], runs, training=training))[first].start == start

    def test_a_higher_priority_comes_before_any_share(self) -> None:
        runs = [waiting("a1", owner="a", priority=1), waiting("b1", owner="b")]
        assert predict_starts(snapshot([worker(0)], runs, used={"a": 1e9}))["a1"].start == 0


class TestQuotas:
    TRAINING = (
        TrainingRun("r", 1, "key", ("key", "exp"), end=30.0),
        TrainingRun("s", 1, "other", ("other",), end=5.0),
    )

    def starts(self, runs: list[WaitingRun], limits: dict[str, int], *frees_at: float, **seconds: float) -> list[float]:
        """Return the start of each run, in the order of their ids, while a run of `key` and `exp` trains for 30 s."""
        queue = snapshot([worker(*frees_at)], runs, seconds, self.TRAINING, limits=limits)
        return [start.start for _, start in sorted(predict_starts(queue).items())]

    def test_keep_runs_waiting_while_devices_are_free(self) -> None:
        runs = [waiting(name, quotas=("key",)) for name in "abc"]
        assert self.starts(runs, {}, 0, 0, 0) == [0, 0, 0]
        assert self.starts(runs, {"key": 3}, 0, 0, 0, a=7) == [0, 0, 7]
        assert self.starts(runs[:2], {"key": 2}, 0, 0, a=UNKNOWN) == [0, 30]

    def test_have_room_again_when_a_run_that_trains_has_ended(self) -> None:
        runs = [waiting("a", quotas=("key",)), waiting("b", quotas=("free",)), waiting("c", quotas=("free", "exp"))]
        assert self.starts(runs, {"key": 1, "exp": 1}, 0, 0, 0) == [30, 0, 30]

    def test_that_are_too_small_hold_no_device_for_a_run(self) -> None:
        runs = [waiting("a", quotas=("key",), devices=2), waiting("b")]
        assert self.starts(runs, {"key": 1}, 0, 0) == [math.inf, 0]
        assert self.starts(runs, {"key": 2}, 0, 0, b=50) == [50, 0]

    def test_are_held_for_a_run_on_several_devices_except_for_runs_that_end_in_time(self) -> None:
        runs = [waiting("a", quotas=("key",), devices=2), waiting("b", quotas=("key",)), waiting("c", quotas=("key",))]
        assert self.starts(runs, {"key": 2}, 0, 0, 0, b=50, c=20) == [30, 40, 0]

    def test_of_full_experiments_cost_little_time(self) -> None:
        workers = [worker(*[0] * 8, worker_id=f"w{at:03}") for at in range(200)]
        runs = [
            waiting(f"run{at:03}", owner=f"key{at % 20}", quotas=(f"exp{at % 2}",), not_before=float(at % 50))
            for at in range(1000)
        ]
        began = time.process_time()
        predicted = predict_starts(snapshot(workers, runs, lambda *_: 100, limits={"exp0": 10, "exp1": 10}))
        assert time.process_time() - began < 8
        assert max(start.start for start in predicted.values()) == pytest.approx(4900, abs=100)


def test_a_queue_of_runs_on_several_devices_is_predicted_in_time_for_200_workers() -> None:
    """Predictions are given up after ten seconds."""
    workers = [worker(*[float(at % 50)] * 8, worker_id=f"w{at:03}") for at in range(200)]
    runs = [waiting(f"run{at:03}", devices=1 + at % 2, owner=f"key{at % 20}") for at in range(1000)]
    began = time.process_time()
    predicted = predict_starts(snapshot(workers, runs, lambda *_: 100))
    assert time.process_time() - began < 8
    assert all(start.start < math.inf for start in predicted.values())


def test_a_long_queue_is_predicted_in_time_for_few_workers() -> None:
    workers = [worker(0, 0, worker_id=f"w{at}") for at in range(4)]
    runs = [waiting(f"run{at:04}", memory_mb=at, owner=f"key{at % 20}") for at in range(1000)]
    began = time.process_time()
    predicted = predict_starts(snapshot(workers, runs, lambda run, _: 100 + len(run.run_id)))
    assert time.process_time() - began < 8
    assert all(start.start < math.inf for start in predicted.values())

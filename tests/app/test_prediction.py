"""The arithmetic of predictions, on made-up histories."""

import math
import random
from dataclasses import replace

import pytest

from app.runs import prediction
from app.runs.prediction import Past, Queue, Seat, Task, Timings, Waiting

TASK = Task(twin="same", work=16.0, total_steps=1000, evaluate_every=100, save_every=200)
DONE = Timings(
    twin="same", work=16.0, total_steps=1000, step=1000, loading=20.0, training=2000.0, step_seconds=2.0,
    evaluations=9, evaluating=90.0, saves=4, saving=12.0, finishing=30.0,
)  # fmt: skip
HALFWAY = replace(DONE, step=500, training=1500.0, step_seconds=3.0, evaluations=4, evaluating=40.0, finishing=None)


def like(*timings: Timings, device: str = "H100") -> list[Past]:
    return [Past(one, device) for one in timings]


class TestTimeOfAStep:
    def test_is_what_the_steps_took_without_the_slow_first_ones(self) -> None:
        assert prediction.step_seconds([(10, 60.0), *[(10, 20.0)] * 9]) == pytest.approx(2.0)
        assert prediction.step_seconds([(10, 60.0)]) == pytest.approx(6.0)
        assert prediction.step_seconds([]) is None

    def test_follows_a_change_of_speed(self) -> None:
        """Half as fast since a while: more than halfway there."""
        changed = prediction.step_seconds([*[(1, 1.0)] * 10, *[(1, 2.0)] * 10])
        assert changed is not None and 1.6 < changed < 2.0

    def test_one_step_that_took_for_ever_changes_it_little(self) -> None:
        steps = [(1, 1.0)] * 20
        steps[10] = (1, 1000.0)
        found = prediction.step_seconds(steps)
        assert found is not None and found < 1.2

    def test_jitter_evens_out(self) -> None:
        chance = random.Random(3)
        for _ in range(20):
            found = prediction.step_seconds([(1, chance.lognormvariate(-0.08, 0.4)) for _ in range(60)])
            assert found == pytest.approx(1.0, rel=0.25)


class TestRemaining:
    def test_a_run_on_its_way_goes_by_its_own_speed_and_ends_as_like_runs_do(self) -> None:
        told = prediction.remaining(TASK, HALFWAY, prediction.habit(like(*[DONE] * 3), TASK, "H100"))
        # 500 steps of 3 s, evaluations at 600, 700, 800, 900, saves at 600 and 800, then the end.
        assert told is not None and told.seconds == pytest.approx(500 * 3 + 4 * 10 + 2 * 3 + 30)
        assert told.confidence == "high" and "500 of 1,000 steps left, by its own speed, 3 s a step" in told.basis

    @pytest.mark.parametrize(("step", "seconds_a_step"), [(0, 2.0), (50, 2.5), (100, 3.0), (400, 3.0)])
    def test_like_runs_count_less_and_less_until_a_tenth_is_done(self, step: int, seconds_a_step: float) -> None:
        plain = replace(TASK, evaluate_every=None, save_every=None)
        so_far = Timings(total_steps=1000, step=step, training=step * 3.0, step_seconds=3.0 if step else None)
        told = prediction.remaining(plain, so_far, prediction.habit(like(DONE), plain))
        assert told is not None and told.seconds == pytest.approx((1000 - step) * seconds_a_step + 30)
        assert told.confidence == ("high" if step >= 100 else "medium")

    def test_like_runs_with_other_steps_count_only_at_the_very_first(self) -> None:
        plain = replace(TASK, evaluate_every=None, save_every=None)
        others = prediction.habit(like(replace(DONE, twin="other", training=90_000.0, finishing=0.0)), plain)
        for step, seconds_a_step in ((0, 90.0), (10, 46.5), (20, 3.0)):
            so_far = Timings(total_steps=1000, step=step, training=step * 3.0, step_seconds=3.0 if step else None)
            told = prediction.remaining(plain, so_far, others)
            assert told is not None and told.seconds == pytest.approx((1000 - step) * seconds_a_step)
            assert told.confidence == "low"

    def test_without_any_like_run_its_own_speed_has_to_do(self) -> None:
        told = prediction.remaining(TASK, HALFWAY, None)
        assert told is not None and told.confidence == "medium"
        assert prediction.remaining(TASK, Timings(total_steps=1000), None) is None

    @pytest.mark.parametrize(
        ("change", "seconds"),
        [({"time_limit": 1800.0}, 300.0), ({"time_limit": 1e6}, 1500.0), ({"total_steps": 600}, 300.0)],
    )
    def test_limits_end_it_sooner(self, change: dict[str, float], seconds: float) -> None:
        plain = replace(TASK, evaluate_every=None, save_every=None)
        wanted = replace(plain, **change)  # type: ignore[arg-type]
        told = prediction.remaining(wanted, replace(HALFWAY, saves=0, saving=0.0), None)
        assert told is not None and told.seconds == pytest.approx(seconds)

    def test_what_may_stop_early_is_told_with_less_confidence(self) -> None:
        told = prediction.remaining(replace(TASK, may_end_early=True), HALFWAY, None)
        assert told is not None and told.confidence == "low" and "early stopping" in told.basis


class TestWhole:
    def test_twins_are_believed_when_there_are_three_that_agree(self) -> None:
        seconds = 20 + 2000 + 9 * 10 + 4 * 3 + 30
        sure = prediction.whole(TASK, prediction.habit(like(DONE, DONE, replace(DONE, training=2100.0)), TASK))
        assert sure is not None and (sure.seconds, sure.confidence) == (pytest.approx(seconds), "medium")
        one = prediction.whole(TASK, prediction.habit(like(DONE), TASK))
        assert one is not None and (one.seconds, one.confidence) == (pytest.approx(seconds), "low")
        wild = [replace(DONE, training=training) for training in (200.0, 2000.0, 8000.0)]
        assert getattr(prediction.whole(TASK, prediction.habit(like(*wild), TASK)), "confidence", "") == "low"

    def test_runs_with_other_steps_are_scaled_by_the_size_of_a_step(self) -> None:
        other = like(replace(DONE, twin="other", work=32.0))
        told = prediction.habit(other, TASK)
        assert told is not None and (told.step_seconds, told.are_twins) == (1.0, False)

    def test_a_twin_on_this_device_says_more_than_others_elsewhere(self) -> None:
        past = [*like(replace(DONE, training=9000.0), device="T4"), *like(DONE), *like(replace(DONE, twin="other"))]
        found = prediction.habit(past, TASK, "H100")
        assert found is not None and (found.runs, found.step_seconds) == (1, 2.0)
        elsewhere = prediction.habit(past, TASK, "A100")
        assert elsewhere is not None and (elsewhere.runs, elsewhere.step_seconds) == (2, 5.5)

    def test_a_resumed_run_has_only_the_rest_to_do(self) -> None:
        plain = replace(TASK, evaluate_every=None, save_every=None)
        whole, rest = (
            prediction.whole(replace(plain, first_step=first), prediction.habit(like(DONE), plain))
            for first in (0, 900)
        )
        assert whole is not None and rest is not None and whole.seconds - rest.seconds == pytest.approx(1800)

    def test_nothing_is_made_up(self) -> None:
        assert prediction.whole(TASK, None) is None
        assert prediction.habit([Past(Timings(twin="same"), None)], TASK) is None
        unknown = replace(TASK, total_steps=None)
        assert prediction.whole(unknown, prediction.habit(like(replace(DONE, twin="other")), unknown)) is None
        # Twins tell how many steps came out of the same data.
        assert prediction.whole(unknown, prediction.habit(like(DONE), unknown)) is not None


class TestTask:
    CONFIG = {"base_model": "m", "method": "lora", "batch_size": 4, "gradient_accumulation_steps": 2, "epochs": 3}

    def steps(self, backend: str = "celery", rows: int | None = 100, **config: object) -> int | None:
        given = ["extra.steps"] if backend == "fake" else []
        return prediction.task(backend, {**self.CONFIG, **config}, given, rows).total_steps

    def test_steps_are_known_before_they_are_counted_where_rows_tell_them(self) -> None:
        assert self.steps() == 39  # three times thirteen steps of eight
        assert self.steps(max_steps=7) == 7
        assert self.steps(eval_split=0.5) == 21
        assert self.steps(stop_at_step=20) == 20
        assert self.steps(min_steps=50) == 50
        assert self.steps(packing=True) is None
        assert self.steps(rows=None) is None
        assert self.steps("fake", extra={"steps": 12}) == 12

    def test_only_what_takes_time_makes_runs_differ(self) -> None:
        def twin(*datasets: str, **config: object) -> str:
            return prediction.task("celery", {**self.CONFIG, **config}, [], 100, datasets).twin

        assert twin() == twin(learning_rate=1.0, seed=3, max_steps=9, save_steps=1)
        different = [twin(), twin(batch_size=8), twin(max_seq_length=9), twin("ds_1"), twin(extra={"steps": 1})]
        assert len(set(different)) == len(different)


class TestQueue:
    def waiting(self, run_id: str = "a", **change: object) -> Waiting:
        return replace(Waiting(run_id, "celery", None, 0, 1, 0.0), **change)  # type: ignore[arg-type]

    def seat(self, *free: float, **change: object) -> Seat:
        return replace(Seat("w", frozenset({"celery"}), "cuda", "H100", 80_000, free), **change)  # type: ignore[arg-type]

    def test_each_takes_the_first_device_that_comes_free_after_those_before_it(self) -> None:
        queue = Queue([self.seat(0.0, 100.0)])
        starts = []
        for seconds in (50.0, 300.0, 10.0, 10.0):
            turn = queue.turn(self.waiting())
            queue.take(self.waiting(), turn, seconds)
            starts.append(turn.start)
        assert starts == [0.0, 50.0, 100.0, 110.0]

    def test_several_devices_have_to_be_free_on_one_worker(self) -> None:
        queue = Queue([self.seat(0.0, worker_id="v"), self.seat(30.0, 70.0)])
        assert queue.turn(self.waiting(devices=2)).start == 70.0
        assert queue.turn(self.waiting(devices=3)).seat is None

    @pytest.mark.parametrize(
        "change", [{"kind": "cpu"}, {"backend": "fake"}, {"memory_mb": 90_000}, {"devices": 2}], ids=str
    )
    def test_what_no_worker_could_take_has_no_seat(self, change: dict[str, object]) -> None:
        assert Queue([self.seat(0.0)]).turn(self.waiting(**change)).seat is None

    def test_a_pause_is_waited_out_and_what_nobody_knows_is_not_guessed(self) -> None:
        assert Queue([self.seat(0.0)]).turn(self.waiting(not_before=20.0)).start == 20.0
        assert math.isinf(Queue([self.seat(math.inf)]).turn(self.waiting()).start)

"""The arithmetic of predictions, on made-up histories."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from anneal.contracts.schemas.runs.reads import Prediction
from app.cli.runs.watch import WatchState, refresh_interval
from app.runs.queue import durations
from app.runs.queue.durations import PastAttempt, Timings, TypicalDurations, Workload

WORK = Workload(twin="same", work=16.0, total_steps=1000, evaluate_every=100, save_every=200)
DONE = Timings(
    twin="same", work=16.0, total_steps=1000, step=1000, loading=20.0, training=2000.0, step_seconds=2.0,
    evaluations=9, evaluating=90.0, saves=4, saving=12.0, finishing=30.0,
)  # fmt: skip
HALFWAY = replace(DONE, step=500, training=1500.0, step_seconds=3.0, evaluations=4, evaluating=40.0, finishing=None)


def like(*timings: Timings, device: str = "H100") -> list[PastAttempt]:
    return [PastAttempt(f"run_{number}", device, one) for number, one in enumerate(timings)]


def typical(*timings: Timings, work: Workload = WORK) -> TypicalDurations:
    return durations.typical_durations(like(*timings), work, "H100")


class TestTimeOfAStep:
    def test_is_what_the_steps_took_without_the_slow_first_ones(self) -> None:
        assert durations.step_seconds([(10, 60.0), *[(10, 20.0)] * 9]) == pytest.approx(2.0)
        assert durations.step_seconds([(10, 60.0)]) == pytest.approx(6.0)
        assert durations.step_seconds([]) is None

    def test_follows_a_change_of_speed(self) -> None:
        """Half as fast since a while: more than halfway there."""
        changed = durations.step_seconds([*[(1, 1.0)] * 10, *[(1, 2.0)] * 10])
        assert changed is not None and 1.6 < changed < 2.0

    def test_one_step_that_took_for_ever_changes_it_little(self) -> None:
        steps = [(1, 1.0)] * 20
        steps[10] = (1, 1000.0)
        seconds = durations.step_seconds(steps)
        assert seconds is not None and seconds < 1.2

    def test_jitter_evens_out(self) -> None:
        chance = random.Random(3)
        for _ in range(20):
            seconds = durations.step_seconds([(1, chance.lognormvariate(-0.08, 0.4)) for _ in range(60)])
            assert seconds == pytest.approx(1.0, rel=0.25)


class TestRemaining:
    def test_a_run_on_its_way_goes_by_its_own_speed_and_ends_as_like_runs_do(self) -> None:
        reported = durations.estimate(WORK, HALFWAY, typical(*[DONE] * 3))
        # 500 steps of 3 s, evaluations at 600, 700, 800, 900, saves at 600 and 800, then the end.
        assert reported is not None and reported.seconds == pytest.approx(500 * 3 + 4 * 10 + 2 * 3 + 30)
        assert (
            reported.confidence == "high"
            and "500 of 1,000 steps left, based on its own speed, 3 s per step" in reported.basis
        )

    @pytest.mark.parametrize(("step", "seconds_a_step"), [(0, 2.0), (50, 2.0), (100, 3.0), (400, 3.0)])
    def test_twins_give_the_speed_until_a_tenth_is_done(self, step: int, seconds_a_step: float) -> None:
        plain = replace(WORK, evaluate_every=None, save_every=None)
        so_far = Timings(total_steps=1000, step=step, training=step * 3.0, step_seconds=3.0 if step else None)
        reported = durations.estimate(plain, so_far, typical(DONE))
        assert reported is not None and reported.seconds == pytest.approx((1000 - step) * seconds_a_step + 30)
        assert reported.confidence == ("high" if step >= 100 else "medium")

    def test_runs_with_other_steps_give_the_speed_until_it_has_its_own(self) -> None:
        plain = replace(WORK, evaluate_every=None, save_every=None)
        others = typical(replace(DONE, twin="other", training=90_000.0, finishing=0.0))
        for step, seconds_a_step in ((0, 90.0), (10, 3.0)):
            so_far = Timings(total_steps=1000, step=step, training=step * 3.0, step_seconds=3.0 if step else None)
            reported = durations.estimate(plain, so_far, others)
            assert reported is not None and reported.seconds == pytest.approx((1000 - step) * seconds_a_step)
            assert reported.confidence == "low"

    def test_without_any_like_run_its_own_speed_has_to_do(self) -> None:
        reported = durations.estimate(WORK, HALFWAY, typical())
        assert reported is not None and reported.confidence == "medium"
        assert durations.estimate(WORK, Timings(total_steps=1000), typical()) is None

    @pytest.mark.parametrize(
        ("change", "seconds"),
        [({"time_limit": 1800.0}, 300.0), ({"time_limit": 1e6}, 1500.0), ({"total_steps": 600}, 300.0)],
    )
    def test_limits_end_it_sooner(self, change: dict[str, float], seconds: float) -> None:
        plain = replace(WORK, evaluate_every=None, save_every=None)
        limited = replace(plain, **change)  # type: ignore[arg-type]
        reported = durations.estimate(limited, replace(HALFWAY, saves=0, saving=0.0), typical())
        assert reported is not None and reported.seconds == pytest.approx(seconds)

    def test_a_repaired_attempt_that_goes_back_has_the_rest_to_do(self) -> None:
        plain = replace(WORK, evaluate_every=None, save_every=None, next_step=600)
        again = Timings(total_steps=1000, start_step=200, step=250, training=50.0, step_seconds=1.0)
        reported = durations.estimate(plain, again, typical())
        assert reported is not None and reported.seconds == pytest.approx(750)

    def test_what_may_stop_early_is_reported_with_less_confidence(self) -> None:
        reported = durations.estimate(replace(WORK, may_end_early=True), HALFWAY, typical())
        assert reported is not None and reported.confidence == "low" and "early stopping" in reported.basis


class TestWhole:
    def test_twins_make_it_more_than_a_guess(self) -> None:
        reported = durations.estimate(WORK, None, typical(DONE, DONE, replace(DONE, training=2100.0)))
        seconds = 20 + 2000 + 9 * 10 + 4 * 3 + 30
        assert reported is not None and (reported.seconds, reported.confidence) == (pytest.approx(seconds), "medium")
        assert reported.basis == "1,000 of 1,000 steps left, based on 3 earlier runs with this configuration"
        others = durations.estimate(WORK, None, typical(replace(DONE, twin="other")))
        assert others is not None and (others.seconds, others.confidence) == (pytest.approx(seconds), "low")

    def test_runs_with_other_steps_are_scaled_by_the_size_of_a_step(self) -> None:
        reported = typical(replace(DONE, twin="other", work=32.0))
        assert (reported.step_seconds, reported.same_config) == (1.0, False)

    def test_a_twin_on_this_device_says_more_than_others_elsewhere(self) -> None:
        past = [*like(replace(DONE, training=9000.0), device="T4"), *like(DONE), *like(replace(DONE, twin="other"))]
        here = durations.typical_durations(past, WORK, "H100")
        assert (here.runs, here.step_seconds) == (1, 2.0)
        elsewhere = durations.typical_durations(past, WORK, "A100")
        assert (elsewhere.runs, elsewhere.step_seconds) == (2, 5.5)

    def test_a_resumed_run_has_only_the_rest_to_do(self) -> None:
        plain = replace(WORK, evaluate_every=None, save_every=None)
        whole, rest = (durations.estimate(replace(plain, next_step=first), None, typical(DONE)) for first in (0, 900))
        assert whole is not None and rest is not None and whole.seconds - rest.seconds == pytest.approx(1800)

    def test_a_run_that_goes_on_has_used_up_a_part_of_its_time(self) -> None:
        limited = replace(WORK, time_limit=1000.0, next_step=400, evaluate_every=None, save_every=None)
        reported = durations.estimate(limited, None, typical(DONE))
        assert reported is not None and reported.seconds == pytest.approx(20 + (1000 - 400 * 2.0) + 30)
        # What it trained as another run counts for that one.
        reported = durations.estimate(replace(limited, first_step=400), None, typical(DONE))
        assert reported is not None and reported.seconds == pytest.approx(20 + 1000 + 30)

    def test_nothing_is_made_up(self) -> None:
        assert durations.estimate(WORK, None, typical()) is None
        assert typical(Timings(twin="same")).runs == 0, "an attempt without any step"
        unknown = replace(WORK, total_steps=None)
        assert durations.estimate(unknown, None, typical(replace(DONE, twin="other"))) is None
        # Twins know how many steps come out of the same data.
        assert durations.estimate(unknown, None, typical(DONE)) is not None


class TestWorkload:
    CONFIG = {"base_model": "m", "method": "lora", "batch_size": 4, "gradient_accumulation_steps": 2, "epochs": 3}

    def work(self, config: dict[str, object], **columns: object) -> Workload:
        row = {
            "backend": "celery", "dataset_id": "ds_1", "eval_dataset_id": None, "rows": 100, "total_steps": None,
            "extra_eval_datasets": {}, "resumed_at": None, "saved_at": 0, "stop_mode": None, "current_step": 0,
            "current_epoch": 0.0, "devices_needed": 1, "sequence_parallel": 1,
        }  # fmt: skip
        return Workload.of(SimpleNamespace(config={**self.CONFIG, **config}, **{**row, **columns}))

    def steps(self, backend: str = "celery", rows: int | None = 100, **config: object) -> int | None:
        return self.work(config, backend=backend, rows=rows).total_steps

    def test_steps_are_known_before_they_are_counted_where_rows_give_them(self) -> None:
        assert self.steps() == 39  # three times thirteen steps of eight
        assert self.steps(max_steps=7) == 7
        assert self.steps(eval_split=0.5) == 21
        assert self.steps(stop_at_step=20) == 20
        assert self.steps(min_steps=50) == 50
        assert self.steps(packing=True) is None
        assert self.steps(rows=None) is None
        assert self.steps("fake") is None
        assert self.steps(extra={"data_source": {"type": "generated"}}) is None

    def test_a_run_on_several_devices_has_fewer_steps_and_no_twins_on_one(self) -> None:
        on_one, on_two = self.work({}), self.work({}, devices_needed=2)
        assert on_two.total_steps == 21, "three times seven steps of sixteen"
        assert on_two.twin != on_one.twin and on_two.work == on_one.work, "the steps of each device take as long"
        shared = self.work({}, devices_needed=2, sequence_parallel=2)
        assert shared.total_steps == on_one.total_steps, "devices that share sequences have the same rows"
        assert shared.work == on_one.work / 2, "and each a part of each sequence"
        assert len({shared.twin, on_two.twin, on_one.twin}) == 3

    @pytest.mark.parametrize(
        ("stop_at", "first_step", "ends_at"), [(None, 0, 90), (50, 0, 50), (50, 50, 90), (95, 0, 90)]
    )
    def test_the_reported_total_counts_and_a_stop_bounds_it(
        self, stop_at: int | None, first_step: int, ends_at: int
    ) -> None:
        """A run that continues another at its stop goes on; one that was lost itself does not."""
        config: dict[str, object] = {"max_steps": 60, "stop_at_step": stop_at}
        work = self.work(config, total_steps=90, resumed_at=first_step, saved_at=50)
        assert (work.total_steps, work.next_step) == (ends_at, 50)

    @pytest.mark.parametrize(
        ("step", "epoch", "end"), [(3, 0.24, 12), (12, 12 / 13, 13), (13, 1.0, 26), (30, 30 / 13, 39), (10, 0.8, 12)]
    )
    def test_an_epoch_ends_at_a_step_that_progress_reports(self, step: int, epoch: float, end: int) -> None:
        """Thirteen steps an epoch, or twelve and a half."""
        stopping = {"stop_mode": "epoch_end", "total_steps": 1000, "current_step": step, "current_epoch": epoch}
        assert self.work({}, **stopping).total_steps == end

    def test_only_what_takes_time_makes_runs_differ(self) -> None:
        def twin(*datasets: str, **config: object) -> str:
            return durations.config_digest({**self.CONFIG, **config}, *datasets)

        assert twin() == twin(learning_rate=1.0, seed=3, max_steps=9, save_steps=1)
        different = [twin(), twin(batch_size=8), twin(max_seq_length=9), twin("ds_1"), twin(extra={"steps": 1})]
        assert len(set(different)) == len(different)
        first, same, more = (self.work({}, extra_eval_datasets=sets).twin for sets in ({"a": "1"}, {"b": "1"}, {}))
        assert first == same != more


class TestWords:
    def test_what_is_left_is_counted_from_now_and_asked_for_more_often_near_the_end(self) -> None:
        now = datetime.now(UTC)
        seconds = {"in about 40 s": 40.4, "any moment": -20.0}
        for words, left in seconds.items():
            reported = Prediction(start_at=None, finish_at=now + timedelta(seconds=left), confidence="high", basis="")
            seen = WatchState("run_1", "counting", "running", 0, 10, prediction=reported)
            assert seen.outlook == f"finishes {words}"
            assert refresh_interval(reported) < 15 < refresh_interval(None)
        seen.status = "completed"
        assert seen.outlook == ""

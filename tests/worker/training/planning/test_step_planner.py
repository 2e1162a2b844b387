"""The fastest plan that fits is found with few passes, on devices of any size and speed."""

import dataclasses
import random
from dataclasses import dataclass

import pytest

from worker.training.planning.step_planner import (
    LEAST_GAIN,
    MeasuredPass,
    StepChoices,
    StepPlan,
    StepPlanner,
    Trial,
    micro_batches,
)

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A simulated device with a model on it: what a pass needs and takes."""

    usable: float = 70 * GIB
    weights: float = 6 * GIB
    layers: int = 36
    layer_bytes: float = 300e3
    """Per position: what a layer keeps."""
    boundary_bytes: float = 8e3
    """Per position: what a recomputed layer keeps."""
    head_bytes: float = 60e3
    workspace: float = 3 * GIB
    seconds_per_position: float = 1.1e-4
    fixed_seconds: float = 0.05
    recomputed_part: float = 0.35
    host_seconds: float = 0.0
    """What the host needs to launch a pass, however few its positions are."""
    later: int = GIB

    def peak(self, trial: Trial, positions: int) -> float:
        activation_bytes = (self.layers - trial.recomputed) * self.layer_bytes + trial.recomputed * self.boundary_bytes
        again = trial.recomputed * self.boundary_bytes + self.layer_bytes if trial.recomputed else 0.0
        at_head, at_first_layer = (activation_bytes + self.head_bytes) * positions, again * positions
        return self.weights + max(at_head, at_first_layer, self.workspace)

    def seconds(self, recomputed: int, positions: float) -> float:
        once = max(self.fixed_seconds + self.seconds_per_position * positions, self.host_seconds)
        return once * (1 + self.recomputed_part * recomputed / self.layers)

    def choices(
        self, *, rows_per_step: int = 16, fixed: int | None = None, longest: int = 4096, mean: float = 4096, **more: int
    ) -> StepChoices:
        sizes = (fixed,) if fixed else micro_batches(rows_per_step, rows_per_step)
        return StepChoices(
            rows_per_step=rows_per_step,
            micro_batches=sizes,
            configured_rows=4 if 4 in sizes else sizes[0],
            layers=self.layers,
            fewest_recomputed=more.get("fewest", 0),
            most_recomputed=more.get("most", self.layers),
            longest_tokens={rows: rows * longest for rows in sizes},
            mean_tokens={rows: rows * mean for rows in sizes},
            usable_bytes=round(self.usable),
            allocated_bytes=round(self.weights),
            later_bytes=self.later,
        )

    def plan(self, choices: StepChoices, *, memory: float | None = None) -> StepPlan:
        """Measure what the planner asks for; a pass that needs more than `memory` fails."""
        planner = StepPlanner(choices)
        while (trial := planner.next_trial()) is not None:
            positions = choices.longest_tokens[trial.rows]
            peak, seconds = self.peak(trial, positions), self.seconds(trial.recomputed, positions)
            failed = peak > (memory or self.usable / 0.9)
            planner.add_measurement(MeasuredPass(trial, positions, None if failed else round(peak), seconds))
            assert len(planner.passes) <= 12, planner.passes
        return planner.best_plan()

    def fits(self, trial: Trial, choices: StepChoices) -> bool:
        return self.peak(trial, choices.longest_tokens[trial.rows]) + self.later <= choices.usable_bytes

    def step_seconds(self, trial: Trial, choices: StepChoices) -> float:
        steps = choices.rows_per_step // trial.rows
        return steps * self.seconds(trial.recomputed, choices.mean_tokens[trial.rows])

    def best(self, choices: StepChoices) -> float | None:
        """The least seconds of any plan that fits."""
        layers = range(choices.fewest_recomputed, choices.most_recomputed + 1)
        trials = (Trial(rows, recomputed) for rows in choices.micro_batches for recomputed in layers)
        fitting = [self.step_seconds(trial, choices) for trial in trials if self.fits(trial, choices)]
        return min(fitting, default=None)


def chosen(plan: StepPlan) -> tuple[int, int]:
    return plan.rows, plan.recomputed


def test_fixed_micro_batch_that_fits_as_it_is_needs_one_pass() -> None:
    device = Device(usable=150 * GIB)
    plan = device.plan(device.choices(rows_per_step=12, fixed=3))
    assert (chosen(plan), plan.accumulation_steps, plan.fits, len(plan.passes)) == ((3, 0), 4, True, 1)


@pytest.mark.parametrize("usable", [20, 30, 50, 70, 100])
def test_fixed_micro_batch_recomputes_as_few_layers_as_fit(usable: int) -> None:
    device = Device(usable=usable * GIB)
    choices = device.choices(fixed=4)
    plan = device.plan(choices)
    least = next(layers for layers in range(37) if device.fits(Trial(4, layers), choices))
    assert plan.fits and plan.rows == 4 and least <= plan.recomputed <= least + 3 and len(plan.passes) <= 6


def test_less_is_recomputed_in_smaller_micro_batches_where_that_is_faster() -> None:
    device = Device()
    choices = device.choices()
    plan = device.plan(choices)
    assert chosen(plan) == (1, 0), "four rows would recompute two thirds of the layers"
    (four,) = (other for other in plan.alternatives if other.trial.rows == 4)
    assert four.trial.recomputed > 18 and four.step_seconds > (plan.step_seconds or 0)


def test_short_rows_are_put_together_where_each_pass_has_a_fixed_cost() -> None:
    device = Device(fixed_seconds=0.15)
    plan = device.plan(device.choices(longest=1024, mean=300))
    assert plan.rows == 16


def test_middle_micro_batch_is_chosen_where_smaller_ones_wait_for_the_host() -> None:
    device = Device(layer_bytes=150e3, fixed_seconds=0.02, seconds_per_position=8.8e-5, host_seconds=0.45)
    choices = device.choices(rows_per_step=4)
    assert not device.fits(Trial(4, 0), choices)
    plan = device.plan(choices)
    assert (plan.rows, plan.recomputed) == (2, 0), plan


def test_recomputation_that_seems_cheap_while_the_host_is_waited_for_hides_no_faster_plan() -> None:
    """An 8B model on an H100, whose passes of one row waited for the host; seconds of the last one are computed."""
    measured = {
        Trial(1, 36): (0.526, 8074),
        Trial(1, 0): (0.467, 25879),
        Trial(4, 7): (1.262, 70074),
        Trial(2, 0): (0.59, 45346),
    }
    choices = Device().choices(rows_per_step=4)
    choices = dataclasses.replace(choices, usable_bytes=round(70.7 * GIB), later_bytes=333 << 20)
    planner = StepPlanner(choices)
    while (trial := planner.next_trial()) is not None:
        seconds, mebibytes = measured[trial]
        planner.add_measurement(MeasuredPass(trial, choices.longest_tokens[trial.rows], mebibytes << 20, seconds))
    assert (planner.best_plan().rows, planner.best_plan().recomputed) == (2, 0)


def test_configured_micro_batch_stays_unless_another_gains_clearly() -> None:
    device = Device(usable=400 * GIB, fixed_seconds=0.01)
    choices = device.choices()
    alone, configured = (device.step_seconds(Trial(rows, 0), choices) for rows in (16, 4))
    assert (1 - LEAST_GAIN) * configured < alone < configured
    assert chosen(device.plan(choices)) == (4, 0)


def test_explicit_recomputation_is_kept_while_the_micro_batch_is_chosen() -> None:
    device = Device(fixed_seconds=0.5)
    for layers in (0, 18, 36):
        plan = device.plan(device.choices(fewest=layers, most=layers))
        assert plan.recomputed == layers and plan.fits


def test_nothing_that_fits_gives_the_smallest_plan_and_says_so() -> None:
    device = Device(usable=7 * GIB)
    plan = device.plan(device.choices())
    assert (chosen(plan), plan.fits, plan.needed_bytes, plan.step_seconds) == ((1, 36), False, None, None)
    measured = device.plan(device.choices(), memory=1000 * GIB)
    assert (chosen(measured), measured.fits) == ((1, 36), False)
    assert measured.needed_bytes is not None and measured.needed_bytes > 7 * GIB


def test_model_that_recomputes_all_or_nothing_is_planned_too() -> None:
    device = Device(layers=1, layer_bytes=36 * 300e3, usable=30 * GIB)
    assert chosen(device.plan(device.choices(fixed=4))) == (4, 1)


def test_chosen_plan_was_measured_and_the_passes_are_few_and_close_to_the_best() -> None:
    draw, ratios, passes = random.Random(1), [], []
    for _ in range(400):
        device = Device(
            usable=draw.choice([21, 43, 70, 120]) * GIB,
            weights=draw.uniform(0.2, 40) * GIB,
            layers=draw.randint(1, 80),
            layer_bytes=draw.uniform(20e3, 600e3),
            boundary_bytes=draw.uniform(2e3, 16e3),
            head_bytes=draw.uniform(0, 200e3),
            workspace=draw.uniform(0, 8) * GIB,
            seconds_per_position=1 / draw.uniform(500, 90_000),
            fixed_seconds=draw.uniform(0, 0.3),
            recomputed_part=draw.uniform(0.2, 0.5),
            later=round(draw.uniform(0, 2) * GIB),
        )
        longest = draw.choice([256, 1024, 4096])
        rows = draw.choice([1, 8, 12, 16, 16, 64])
        choices = device.choices(rows_per_step=rows, longest=longest, mean=longest * draw.uniform(0.1, 1))
        plan, best = device.plan(choices), device.best(choices)
        assert plan.fits == (best is not None)
        assert plan.rows * plan.accumulation_steps == rows
        if best is not None:
            assert device.fits(Trial(*chosen(plan)), choices)
            ratios.append(device.step_seconds(Trial(*chosen(plan)), choices) / best)
            passes.append(len(plan.passes))
    assert sum(ratios) / len(ratios) < 1.06 and sum(passes) / len(passes) < 5.1


def test_micro_batches_divide_the_rows_of_a_step() -> None:
    assert micro_batches(16, 16) == (1, 2, 4, 8, 16)
    assert micro_batches(12, 5) == (1, 2, 3, 4)
    assert micro_batches(7, 1) == (1,)

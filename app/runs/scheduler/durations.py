"""Predicts the duration of a run from the durations of its own parts and those of similar runs. No database.

A running run: steps left times the time of its own steps, the newest with the most weight; evaluations and saves on the
way at their average so far; and the time after the last step, from similar runs. While less than a tenth is done,
similar runs also contribute to the time of a step, twins (same configuration) the longest. Start of a pending run:
`turns.py`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from app.contracts.fake_options import FakeOptions
from app.contracts.methods import DEFAULT_METHOD, method_of
from app.contracts.schemas.runs import Confidence
from app.contracts.training_config.field_traits import STEP_TIME
from app.contracts.training_config.raw_config import PROBE_STEPS, is_probe

OWN_PART = 0.1
"""Once this fraction of its steps is done, only a run's own speed counts."""

_OWN_PART_AMONG_OTHERS = 0.02
"""The same if the similar runs are not twins: their steps may be very different."""

_ENOUGH_RUNS, _STEADY = 3, 0.25

_OUTLIER = 3.0

_ROUNDING = 1e-6

_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")


@dataclass(frozen=True)
class Timings:
    """Durations of the parts of an attempt up to `step`, in seconds; `training` excludes evaluations and saves."""

    twin: str = ""
    work: float = 1.0
    total_steps: int | None = None
    start_step: int = 0
    step: int = 0
    loading: float | None = None
    """From the claim to the first step."""
    training: float = 0.0
    step_seconds: float | None = None
    """Seconds per step of the newest steps, by `step_seconds`."""
    evaluations: int = 0
    evaluating: float = 0.0
    saves: int = 0
    saving: float = 0.0
    finishing: float | None = None
    """From the last step to the end, if the run reached its last step."""

    @property
    def mean(self) -> float | None:
        """Average seconds per step."""
        done = self.step - self.start_step
        return self.training / done if done > 0 and self.training > 0 else None


@dataclass(frozen=True)
class PastAttempt:
    """An attempt of a similar run."""

    timings: Timings
    device: str | None


@dataclass(frozen=True)
class Workload:
    """Work of a run, as far as it is known from the configuration and the dataset."""

    twin: str
    """Digest shared by runs that do the same in each step."""
    work: float
    """Size of a step, by which the time of a step is scaled between runs that are not twins."""
    total_steps: int | None
    """Last step of the run, if known."""
    first_step: int = 0
    """Step at which the run started; above 0 if it resumes another."""
    next_step: int = 0
    """Step from which it continues while no attempt of it trains."""
    evaluate_every: int | None = None
    save_every: int | None = None
    time_limit: float | None = None
    may_end_early: bool = False
    ends_with_epoch: bool = False
    """A stop at the end of the epoch was requested."""


@dataclass(frozen=True)
class TypicalDurations:
    """Median durations of similar runs."""

    runs: int
    are_twins: bool
    step_seconds: float
    spread: float
    """Spread of their step times: half of them are within this fraction of the median."""
    loading: float
    evaluation: float | None
    save: float | None
    finishing: float | None
    total_steps: int | None

    def __str__(self) -> str:
        runs = "run" if self.runs == 1 else "runs"
        which = "with this configuration" if self.are_twins else "with this base model and method"
        return f"{self.runs} earlier {runs} {which}"


@dataclass(frozen=True)
class Estimate:
    """Estimated remaining duration, in seconds."""

    seconds: float
    confidence: Confidence
    basis: str


def similarity_key(backend: str, config: Mapping[str, Any]) -> str:
    """Return the key shared by runs that are used to predict each other."""
    # A probe trains only on the longest rows: it is no basis for other runs.
    which = "probe of " if is_probe(config) else ""
    return f"{which}{backend} {config.get('method', DEFAULT_METHOD)} {config.get('base_model')}"[:500]


def task(
    backend: str,
    config: Mapping[str, Any],
    given: Iterable[str],
    rows: int | None,
    datasets: Sequence[str | None] = (),
    *,
    first_step: int = 0,
    next_step: int = 0,
    told_steps: int | None = None,
) -> Workload:
    """Return the work that a configuration defines for rows of these datasets.

    It reads the `DURATION` fields, defaults included. `told_steps` is the total that the trainer reported last: it
    knows the rows, and any extension of the run.
    """
    same = {name: config.get(name) for name in STEP_TIME}
    digest = hashlib.sha256(json.dumps([same, *datasets], sort_keys=True, default=str).encode())
    sequences = (config.get("batch_size") or 1) * (config.get("gradient_accumulation_steps") or 1)
    total = told_steps or _total_steps(backend, config, set(given), rows, sequences)
    stop_at = config.get("stop_at_step")
    if stop_at is not None and first_step < stop_at:
        total = min(total or stop_at, stop_at)
    return Workload(
        twin=digest.hexdigest()[:16],
        work=float(sequences * ((config.get("max_seq_length") or 2048) if config.get("packing") else 1)),
        total_steps=total,
        first_step=first_step,
        next_step=max(first_step, next_step),
        evaluate_every=config.get("eval_steps"),
        save_every=config.get("save_steps"),
        time_limit=config.get("time_limit_seconds"),
        may_end_early=config.get("early_stopping_patience") is not None,
    )


def _total_steps(
    backend: str, config: Mapping[str, Any], given: set[str], rows: int | None, sequences: int
) -> int | None:
    """Return the steps of the whole run, or None if only the worker can know them."""
    if is_probe(config):
        return PROBE_STEPS
    if config.get("max_steps") is not None:
        return max(int(config["max_steps"]), config.get("min_steps") or 0)
    extra = config.get("extra") or {}
    if backend == "fake" and ("epochs" not in given or "extra.steps" in given):
        return FakeOptions.stored(extra).steps
    if extra.get("data_source") is not None:
        return None  # its rows are not those of the file
    # The number of packed sequences, and of rows that are skipped, is known only after tokenization.
    if rows is None or config.get("packing") or method_of(config).generates:
        return None
    held_out = float(config.get("eval_split") or 0)
    steps = math.ceil(float(config.get("epochs") or 1) * math.ceil(rows * (1 - held_out) / sequences))
    return max(steps, config.get("min_steps") or 0, 1)


def epoch_end(at: int, step: int, epoch: float) -> int | None:
    """Return the last step of the epoch of step `at` + 1, for a run that was in `epoch` at `step`; None: unknown."""
    if step <= 0 or epoch <= 0:
        return None
    in_epoch = step / epoch
    # Epochs have rounding errors: a step that ends one must be neither just before nor just after its end.
    passes = math.floor(at / in_epoch + _ROUNDING) + 1
    return math.ceil(passes * in_epoch - _ROUNDING)


def step_seconds(windows: Sequence[tuple[int, float]]) -> float | None:
    """Estimate the seconds per future step from windows of (steps, seconds), oldest first.

    The first window includes one-time costs, and is ignored if there are others. Outliers are capped at a multiple of
    the median. Weights halve over half of the windows, so that the newest count most.
    """
    used = [(steps, seconds / steps) for steps, seconds in windows if steps > 0]
    used = used[1:] or used
    if not used:
        return None
    most = _OUTLIER * median(rate for _, rate in used)
    half = max(len(used) / 2, 1.0)
    weighed = [(steps * 0.5 ** ((len(used) - 1 - at) / half), rate) for at, (steps, rate) in enumerate(used)]
    return float(sum(weight * min(rate, most) for weight, rate in weighed) / sum(weight for weight, _ in weighed))


def typical_durations(
    past: Sequence[PastAttempt], wanted: Workload, device: str | None = None
) -> TypicalDurations | None:
    """Return typical durations for a task on a device: of twins on it, else twins, else others on it, else others."""
    usable = [one for one in past if one.timings.mean is not None]
    chosen: list[PastAttempt] = []
    for twins, here in ((True, True), (True, False), (False, True), (False, False)):
        chosen = [
            one
            for one in usable
            if (one.timings.twin == wanted.twin or not twins) and (one.device == device or not here)
        ]
        if chosen:
            break
    if not chosen:
        return None
    timings = [one.timings for one in chosen]
    are_twins = all(one.twin == wanted.twin for one in timings)
    means = [(one.mean or 0.0) * (1.0 if are_twins else wanted.work / (one.work or 1.0)) for one in timings]
    middle = median(means)
    return TypicalDurations(
        runs=len(timings),
        are_twins=are_twins,
        step_seconds=middle,
        spread=median(abs(mean - middle) for mean in means) / middle if middle else 0.0,
        loading=_median(one.loading for one in timings) or 0.0,
        evaluation=_median(one.evaluating / one.evaluations for one in timings if one.evaluations),
        save=_median(one.saving / one.saves for one in timings if one.saves),
        finishing=_median(one.finishing for one in timings),
        total_steps=round(_median(one.total_steps for one in timings) or 0) or None if are_twins else None,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return median(known) if known else None


def estimate_total(wanted: Workload, like: TypicalDurations | None) -> Estimate | None:
    """Estimate a task from its claim to its end; None: no similar run has trained yet, or its steps are unknown."""
    total = wanted.total_steps
    if total is None and like is not None and not wanted.ends_with_epoch:
        total = like.total_steps
    if like is None or total is None:
        return None
    steps = max(total - wanted.next_step, 0)
    spent = (wanted.next_step - wanted.first_step) * like.step_seconds
    on_the_way = _steps(wanted, steps, like.step_seconds, spent)
    asides = _asides(wanted, wanted.next_step, on_the_way[0], like.evaluation or 0.0, like.save or 0.0)
    seconds = like.loading + on_the_way[1] + asides + (like.finishing or 0.0)
    sure = like.are_twins and like.runs >= _ENOUGH_RUNS and like.spread <= _STEADY
    return _estimate(seconds, 1 if sure else 0, wanted, f"its {total:,} steps at the speed of {like}")


def estimate_remaining(wanted: Workload, so_far: Timings, like: TypicalDurations | None) -> Estimate | None:
    """Estimate the rest of a running attempt from `so_far.step` on; None: there is no basis for it yet."""
    total = wanted.total_steps
    if total is None and not wanted.ends_with_epoch:
        total = so_far.total_steps
    if total is None:
        return None
    left = max(total - so_far.step, 0)
    all_steps = max(total - so_far.start_step, 1)
    done = max(so_far.step - so_far.start_step, 0) / all_steps
    own = so_far.step_seconds
    if own is None and like is None:
        return None
    fades = OWN_PART if like and like.are_twins else _OWN_PART_AMONG_OTHERS
    part = 0.0 if own is None else 1.0 if like is None else min(done / fades, 1.0)
    each = part * (own or 0.0) + (1 - part) * (like.step_seconds if like else 0.0)
    steps, training = _steps(wanted, left, each, _spent(wanted, so_far, each))
    evaluation = so_far.evaluating / so_far.evaluations if so_far.evaluations else like and like.evaluation
    save = so_far.saving / so_far.saves if so_far.saves else like and like.save
    finishing = like.finishing if like and like.finishing is not None else save
    asides = _asides(wanted, so_far.step, steps, evaluation or 0.0, save or 0.0)
    # Runs that are not twins raise the confidence only for what comes after the last step.
    level = 1 + (like is not None) if done >= OWN_PART else int(like is not None and like.are_twins)
    by = f"its own speed, {each:.3g} s per step" if part == 1 else f"{like}"
    if 0 < part < 1:
        by = f"its own speed and {like}"
    return _estimate(
        training + asides + (finishing or 0.0), level, wanted, f"{left:,} of {total:,} steps left, based on {by}"
    )


def _spent(wanted: Workload, so_far: Timings, each: float) -> float:
    """Return the training time that counts against the limit: that of this attempt, and of steps of earlier ones."""
    earlier = max(so_far.start_step - wanted.first_step, 0)
    return so_far.training + earlier * each


def _steps(wanted: Workload, steps: int, each: float, spent: float) -> tuple[int, float]:
    """Return how many of the steps fit within the time limit, and their seconds."""
    training = steps * each
    if wanted.time_limit is None or training <= wanted.time_limit - spent:
        return steps, training
    allowed = max(wanted.time_limit - spent, 0.0)
    return (int(allowed / each) if each else steps), allowed


def _asides(wanted: Workload, first: int, steps: int, evaluation: float, save: float) -> float:
    """Return the seconds of evaluations and saves before the last step; those after it are part of finishing."""
    last = first + steps - 1

    def times(every: int | None) -> int:
        return max(last // every - first // every, 0) if every else 0

    return times(wanted.evaluate_every) * evaluation + times(wanted.save_every) * save


def _estimate(seconds: float, level: int, wanted: Workload, basis: str) -> Estimate:
    if wanted.ends_with_epoch:
        basis = f"{basis}; it stops at the end of its epoch"
    if not wanted.may_end_early:
        return Estimate(seconds, _LEVELS[level], basis)
    return Estimate(seconds, _LEVELS[max(level - 1, 0)], f"{basis}; early stopping may end it sooner")

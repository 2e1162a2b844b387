"""When a run starts and finishes: the arithmetic, from how long its parts and those of like runs took. No database.

A running run: steps left times the time of its own steps, the newest counting most; evaluations and saves on the way at
what they took so far; and what comes after the last step, from like runs. While less than a tenth is done, like runs
have a part in the time of a step too, twins the longest. When a run that waits has its turn: `turns.py`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, Field

from app.backends.fake_options import FakeOptions
from app.wire import Moment

Confidence = Literal["low", "medium", "high"]

OWN_PART = 0.1
"""Once this part of its steps is done, a run's own speed alone counts."""
_OWN_PART_AMONG_OTHERS = 0.02
"""The same where like runs are no twins: their steps may be of quite another kind."""
_ENOUGH_RUNS, _STEADY = 3, 0.25
_OUTLIER = 3.0
_ROUNDING = 1e-6
_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")
_TWINS = (
    "method", "lora_r", "target_modules", "use_dora", "modules_to_save", "batch_size", "gradient_accumulation_steps",
    "load_in_4bit", "load_in_8bit", "gradient_checkpointing", "activation_offload", "torch_compile",
    "attn_implementation", "max_seq_length", "packing", "eval_split", "rlhf", "extra",
)  # fmt: skip
_BOUNDS = (
    "base_model", "epochs", "max_steps", "min_steps", "eval_steps", "save_steps", "time_limit_seconds", "stop_at_step",
    "early_stopping_patience",
)  # fmt: skip
PROBE_STEPS = 2
"""Of a run that only measures (`extra.probe`)."""
FIELDS = (*_TWINS, *_BOUNDS)
"""Fields of a configuration that its time depends on."""


class Prediction(BaseModel):
    """When a run starts and finishes, as far as this installation's history says something about it."""

    start_at: Moment | None = Field(
        description="When it starts, or started; null: no worker could take it, or nobody knows when one is free."
    )
    finish_at: Moment | None = Field(description="When it finishes; null: there is nothing to go by yet.")
    confidence: Confidence = Field(
        description="`high`: its own speed over a tenth of its steps or more, and what follows from like runs; "
        "`medium`: its own speed, or runs with this very configuration; `low`: a rough guess."
    )
    basis: str = Field(description="What it rests on, in a sentence.")


@dataclass(frozen=True)
class Timings:
    """How long the parts of an attempt took, up to `step`; in seconds, evaluations and saves not part of training."""

    twin: str = ""
    work: float = 1.0
    total_steps: int | None = None
    start_step: int = 0
    step: int = 0
    loading: float | None = None
    """From the claim to the first step."""
    training: float = 0.0
    step_seconds: float | None = None
    """Of the newest steps, by `step_seconds`."""
    evaluations: int = 0
    evaluating: float = 0.0
    saves: int = 0
    saving: float = 0.0
    finishing: float | None = None
    """From the last step to the end, where the run took its last step."""

    @property
    def mean(self) -> float | None:
        """Seconds of a step, on average."""
        done = self.step - self.start_step
        return self.training / done if done > 0 and self.training > 0 else None


@dataclass(frozen=True)
class Past:
    """An attempt of a like run."""

    timings: Timings
    device: str | None


@dataclass(frozen=True)
class Task:
    """What there is to do, as far as the configuration and the data set tell."""

    twin: str
    """Runs that have this in common do the same in each step."""
    work: float
    """Size of a step: what the time of a step is scaled by between runs that are no twins."""
    total_steps: int | None
    """The step that ends it, as far as that is known."""
    first_step: int = 0
    """Where the run took up training; above 0 when it continues another."""
    next_step: int = 0
    """Where it goes on from while no attempt of it trains."""
    evaluate_every: int | None = None
    save_every: int | None = None
    time_limit: float | None = None
    may_end_early: bool = False
    ends_with_epoch: bool = False
    """It was asked to stop at the end of its epoch."""


@dataclass(frozen=True)
class Habit:
    """What like runs took, by the median."""

    runs: int
    are_twins: bool
    step_seconds: float
    spread: float
    """How far their steps lie apart: half of them lie within this part of the median."""
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
    """A time to come, in seconds."""

    seconds: float
    confidence: Confidence
    basis: str


def likeness(backend: str, config: Mapping[str, Any]) -> str:
    """What a run has in common with those that say something about it."""
    # A probe trains on the longest rows alone: it says nothing about other runs.
    which = "probe of " if is_probe(config) else ""
    return f"{which}{backend} {config.get('method', 'qlora')} {config.get('base_model')}"[:500]


def is_probe(config: Mapping[str, Any]) -> bool:
    """Whether a run only measures."""
    return (config.get("extra") or {}).get("probe") is True


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
) -> Task:
    """What a configuration (`FIELDS` of it, defaults included) asks for on so many rows of these data sets.

    `told_steps` are those that the trainer told of last: it knows the rows, and what the run was extended by.
    """
    same = {name: config.get(name) for name in _TWINS}
    digest = hashlib.sha256(json.dumps([same, *datasets], sort_keys=True, default=str).encode())
    sequences = (config.get("batch_size") or 1) * (config.get("gradient_accumulation_steps") or 1)
    total = told_steps or _total_steps(backend, config, set(given), rows, sequences)
    stop_at = config.get("stop_at_step")
    if stop_at is not None and first_step < stop_at:
        total = min(total or stop_at, stop_at)
    return Task(
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
    """Steps of the whole run, or None where only the worker will know."""
    if is_probe(config):
        return PROBE_STEPS
    if config.get("max_steps") is not None:
        return max(int(config["max_steps"]), config.get("min_steps") or 0)
    extra = config.get("extra") or {}
    if backend == "fake" and ("epochs" not in given or "extra.steps" in given):
        return FakeOptions.stored(extra).steps
    if extra.get("data_source") is not None:
        return None  # its rows are not those of the file
    # How many sequences are packed into one, and how many rows are left out, shows when they are tokenised.
    if rows is None or config.get("packing") or config.get("method") == "rlhf":
        return None
    held_out = float(config.get("eval_split") or 0)
    steps = math.ceil(float(config.get("epochs") or 1) * math.ceil(rows * (1 - held_out) / sequences))
    return max(steps, config.get("min_steps") or 0, 1)


def epoch_end(at: int, step: int, epoch: float) -> int | None:
    """The step that ends the epoch of the one after `at`, of a run that was in `epoch` at `step`; None: unknown yet."""
    if step <= 0 or epoch <= 0:
        return None
    in_epoch = step / epoch
    # Epochs are told with rounding errors: a step that ends one is neither just before nor just behind its end.
    passes = math.floor(at / in_epoch + _ROUNDING) + 1
    return math.ceil(passes * in_epoch - _ROUNDING)


def step_seconds(windows: Sequence[tuple[int, float]]) -> float | None:
    """The time of a step to come, from stretches of (steps, seconds), oldest first.

    The first one holds what happens only once, and is left out as soon as there are others; one that took many times as
    long as usual counts as a few times as long; a stretch half as many back counts twice.
    """
    used = [(steps, seconds / steps) for steps, seconds in windows if steps > 0]
    used = used[1:] or used
    if not used:
        return None
    most = _OUTLIER * median(rate for _, rate in used)
    half = max(len(used) / 2, 1.0)
    weighed = [(steps * 0.5 ** ((len(used) - 1 - at) / half), rate) for at, (steps, rate) in enumerate(used)]
    return float(sum(weight * min(rate, most) for weight, rate in weighed) / sum(weight for weight, _ in weighed))


def habit(past: Sequence[Past], wanted: Task, device: str | None = None) -> Habit | None:
    """What like runs say about a task on a device: twins on it, else twins, else others on it, else others."""
    usable = [one for one in past if one.timings.mean is not None]
    chosen: list[Past] = []
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
    return Habit(
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


def whole(wanted: Task, like: Habit | None) -> Estimate | None:
    """How long a task takes from its claim to its end; None: no like run has trained yet, or its steps are unknown."""
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
    return _told(seconds, 1 if sure else 0, wanted, f"its {total:,} steps from {like}")


def remaining(wanted: Task, so_far: Timings, like: Habit | None) -> Estimate | None:
    """How long a running attempt takes from `so_far.step` on; None: there is nothing to go by yet."""
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
    # Of runs that are no twins only the end is believed.
    level = 1 + (like is not None) if done >= OWN_PART else int(like is not None and like.are_twins)
    by = f"its own speed, {each:.3g} s a step" if part == 1 else f"{like}"
    if 0 < part < 1:
        by = f"its own speed and {like}"
    return _told(training + asides + (finishing or 0.0), level, wanted, f"{left:,} of {total:,} steps left, by {by}")


def _spent(wanted: Task, so_far: Timings, each: float) -> float:
    """Time in training that counts towards the limit: that of this attempt, and of steps of earlier ones."""
    earlier = max(so_far.start_step - wanted.first_step, 0)
    return so_far.training + earlier * each


def _steps(wanted: Task, steps: int, each: float, spent: float) -> tuple[int, float]:
    """How many of the steps fit within the time limit, and their seconds."""
    training = steps * each
    if wanted.time_limit is None or training <= wanted.time_limit - spent:
        return steps, training
    allowed = max(wanted.time_limit - spent, 0.0)
    return (int(allowed / each) if each else steps), allowed


def _asides(wanted: Task, first: int, steps: int, evaluation: float, save: float) -> float:
    """Seconds of evaluations and saves before the last step; those after it are part of the finish."""
    last = first + steps - 1

    def times(every: int | None) -> int:
        return max(last // every - first // every, 0) if every else 0

    return times(wanted.evaluate_every) * evaluation + times(wanted.save_every) * save


def _told(seconds: float, level: int, wanted: Task, basis: str) -> Estimate:
    if wanted.ends_with_epoch:
        basis = f"{basis}; it ends with its epoch"
    if not wanted.may_end_early:
        return Estimate(seconds, _LEVELS[level], basis)
    return Estimate(seconds, _LEVELS[max(level - 1, 0)], f"{basis}; early stopping may end it sooner")

"""Predicts the duration of a run from its own speed so far and from similar runs. No database.

Remaining steps times seconds per step, plus the evaluations and saves on the way, plus the time after the last step.
The seconds per step are the run's own, those of its newest steps with the most weight; until a tenth is done they are
those of its twins (same configuration and data), if there are any. Similar runs supply what the run has not done yet.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, Self

from anneal.contracts.methods import DEFAULT_METHOD, method_of
from anneal.contracts.schemas.runs.reads import Confidence
from anneal.contracts.training_config.field_traits import STEP_TIME
from anneal.contracts.training_config.fields import MOST_STEPS
from anneal.contracts.training_config.raw_config import PROBE_STEPS, is_probe

OWN_PART = 0.1
"""Once this fraction of its steps is done, only a run's own speed counts."""

_OUTLIER = 3.0

_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")


@dataclass(frozen=True)
class Timings:
    """Durations of the parts of an attempt up to `step`, in seconds; `training` excludes evaluations and saves."""

    twin: str = ""
    work: float = 1.0
    total_steps: int | None = None
    start_step: int = 0
    step: int = 0
    tokens: float = 0.0
    """Tokens that it has trained, as far as its trainer reports them."""
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

    @classmethod
    def stored(cls, document: Mapping[str, Any]) -> Self:
        """Read stored timings; fields of other versions are ignored."""
        return cls(**{one.name: document[one.name] for one in fields(cls) if one.name in document})

    @property
    def mean(self) -> float | None:
        """Average seconds per step."""
        done = self.step - self.start_step
        return self.training / done if done > 0 and self.training > 0 else None

    @property
    def evaluation(self) -> float | None:
        """Average seconds per evaluation."""
        return self.evaluating / self.evaluations if self.evaluations else None

    @property
    def save(self) -> float | None:
        """Average seconds per save."""
        return self.saving / self.saves if self.saves else None


@dataclass(frozen=True)
class PastAttempt:
    """Attempt of a similar run."""

    run_id: str
    device: str | None
    timings: Timings


@dataclass(frozen=True)
class Workload:
    """Work of a run, as far as it is known."""

    twin: str
    """Digest shared by runs that do the same in each step."""
    work: float = 1.0
    """Size of a step, by which the time of a step is scaled between runs that are not twins."""
    total_steps: int | None = None
    """Last step of the run, if known."""
    first_step: int = 0
    """Step at which the run started; above 0 if it resumes another."""
    next_step: int = 0
    """Step from which it continues while no attempt of it trains."""
    evaluate_every: int | None = None
    save_every: int | None = None
    time_limit: float | None = None
    may_end_early: bool = False

    @classmethod
    def of(cls, run: Any) -> Self:
        """Return the work of a run, given a row of `app.runs.queue.snapshot`; its configuration has `DURATION`."""
        config, first = run.config, run.resumed_at or 0
        data_parallel = run.devices_needed // run.sequence_parallel
        stops = [run.total_steps or counted_steps(run.backend, config, run.rows, data_parallel)]
        if config.get("stop_at_step") is not None and first < config["stop_at_step"]:
            stops.append(config["stop_at_step"])
        in_epoch = steps_in_epoch(run.backend, config, run.rows, data_parallel)
        if run.current_epoch:
            # The average so far; within bounds, since a trainer may report any epoch.
            average = min(run.current_step / run.current_epoch, MOST_STEPS)
            in_epoch = max(round(average), 1)  # rounded for the last batch
            if run.stop_mode == "epoch_end":
                stops.append(round((math.floor(run.current_epoch) + 1) * average))

        def interval(every: Any) -> int | None:
            return in_epoch if every == "epoch" else every

        return cls(
            twin=config_digest(
                config,
                run.dataset_id,
                run.eval_dataset_id,
                *sorted(run.extra_eval_datasets.values()),
                devices=run.devices_needed,
                sequence_parallel=run.sequence_parallel,
            ),
            work=step_size(config, run.sequence_parallel),
            total_steps=min((step for step in stops if step is not None), default=None),
            first_step=first,
            next_step=max(first, run.saved_at),
            evaluate_every=interval(config.get("eval_steps")),
            save_every=interval(config.get("save_steps")),
            time_limit=config.get("time_limit_seconds"),
            may_end_early=config.get("early_stopping_patience") is not None,
        )


@dataclass(frozen=True)
class TypicalDurations:
    """Median durations of similar runs, in seconds; None without any such run."""

    runs: int = 0
    same_config: bool = False
    step_seconds: float | None = None
    loading: float | None = None
    evaluation: float | None = None
    save: float | None = None
    finishing: float | None = None
    total_steps: int | None = None
    """Only of twins."""

    def __str__(self) -> str:
        runs = "run" if self.runs == 1 else "runs"
        which = "with this configuration" if self.same_config else "with this base model and method"
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


def config_digest(
    config: Mapping[str, Any], *datasets: str | None, devices: int = 1, sequence_parallel: int = 1
) -> str:
    """Return the digest shared by runs that do the same in each step."""
    same = {name: config.get(name) for name in STEP_TIME} | {"devices": devices, "shared": sequence_parallel}
    return hashlib.sha256(json.dumps([same, *datasets], sort_keys=True, default=str).encode()).hexdigest()[:16]


def step_size(config: Mapping[str, Any], sequence_parallel: int = 1) -> float:
    """Return the size of a step on each device: its sequences or its part of them, and in packed data its tokens."""
    tokens = (config.get("max_seq_length") or 2048) if config.get("packing") else 1
    rows = (config.get("batch_size") or 1) * (config.get("gradient_accumulation_steps") or 1)
    return float(rows * tokens / sequence_parallel)


def counted_steps(backend: str, config: Mapping[str, Any], rows: int | None, data_parallel: int) -> int | None:
    """Return the steps of the whole run, or None if only its trainer knows them.

    `data_parallel` is the number of devices, or groups of them, that the rows of a step are divided among.
    """
    if is_probe(config):
        return PROBE_STEPS
    least = config.get("min_steps") or 0
    if config.get("max_steps") is not None:
        return max(int(config["max_steps"]), least)
    in_epoch = steps_in_epoch(backend, config, rows, data_parallel)
    return None if in_epoch is None else max(math.ceil((config.get("epochs") or 1) * in_epoch), least, 1)


def steps_in_epoch(backend: str, config: Mapping[str, Any], rows: int | None, data_parallel: int) -> int | None:
    """Return the steps of a pass over the data, or None if only the trainer of the run knows them."""
    # Packed sequences, completions and the rows of a data source are counted by the trainer.
    is_open = config.get("packing") or method_of(config).generates or (config.get("extra") or {}).get("data_source")
    if backend == "fake" or rows is None or is_open:
        return None
    return math.ceil(rows * (1 - (config.get("eval_split") or 0)) / (step_size(config) * data_parallel))


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


def typical_durations(past: Iterable[PastAttempt], workload: Workload, device: str | None = None) -> TypicalDurations:
    """Return typical durations for a run on a device: of twins on it, else twins, else others on it, else others."""

    def similarity_key(attempt: PastAttempt) -> tuple[bool, bool]:
        return attempt.timings.twin == workload.twin, attempt.device == device

    usable = [attempt for attempt in past if attempt.timings.mean is not None]
    if not usable:
        return TypicalDurations()
    same_config, is_here = max(map(similarity_key, usable))
    chosen = [one.timings for one in usable if similarity_key(one) == (same_config, is_here)]
    total = _median(one.total_steps for one in chosen) if same_config else None
    return TypicalDurations(
        runs=len(chosen),
        same_config=same_config,
        step_seconds=_median((one.mean or 0.0) * workload.work / (one.work or 1.0) for one in chosen),
        loading=_median(one.loading for one in chosen),
        evaluation=_median(one.evaluation for one in chosen),
        save=_median(one.save for one in chosen),
        finishing=_median(one.finishing for one in chosen),
        total_steps=None if total is None else round(total),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def estimate(workload: Workload, so_far: Timings | None, like: TypicalDurations) -> Estimate | None:
    """Estimate the seconds from `so_far.step` to the end, or without `so_far` from the claim; None: no basis yet."""
    now = so_far or Timings(start_step=workload.next_step, step=workload.next_step)
    total = workload.total_steps or like.total_steps
    done = (now.step - now.start_step) / max((total or 0) - now.start_step, 1)
    is_own = now.step_seconds is not None and (done >= OWN_PART or not like.same_config)
    each = now.step_seconds if is_own else like.step_seconds
    if total is None or each is None:
        return None
    left = steps = max(total - now.step, 0)
    training = steps * each
    if workload.time_limit is not None:
        spent = now.training + max(now.start_step - workload.first_step, 0) * each
        allowed = max(workload.time_limit - spent, 0.0)
        if allowed < training:
            training, steps = allowed, int(allowed / each)
    evaluation, save = _first(now.evaluation, like.evaluation), _first(now.save, like.save)
    last = now.step + steps - 1  # evaluations and saves after the last step are part of finishing
    seconds = (
        (_first(like.loading) if so_far is None else 0.0)
        + training
        + _times(workload.evaluate_every, now.step, last) * evaluation
        + _times(workload.save_every, now.step, last) * save
        + _first(like.finishing, save)
    )
    level = 1 + bool(like.runs) if done >= OWN_PART else int(like.same_config)
    by = f"its own speed, {each:.3g} s per step" if is_own else f"{like}"
    basis = f"{left:,} of {total:,} steps left, based on {by}"
    if workload.may_end_early:
        level, basis = max(level - 1, 0), f"{basis}; early stopping may end it sooner"
    return Estimate(seconds, _LEVELS[level], basis)


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


def _times(every: int | None, first: int, last: int) -> int:
    return max(last // every - first // every, 0) if every else 0

"""Plan of an optimizer step: rows per micro-batch and recomputed layers, chosen from measured passes.

Nothing here touches a device. `StepPlanner` says which pass to measure next, takes the measurement, and at the end
returns the fastest plan of those whose peak was measured and fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

LEAST_GAIN = 0.05
"""Part of a step's time that another micro-batch than the configured one must save. Times vary by a few percent from
run to run, and with another micro-batch a run draws other dropout masks."""
_NEGLIGIBLE = 0.03
"""Part of a step's time for which no further pass is measured."""
_MOST_PASSES = 10
_MOST_GROWTH = 4
"""How many times as many rows as those of a measured pass the next one may have: further away, predictions fail."""
_RECOMPUTED_PART = 1 / 3
"""Assumed time of a recomputed forward pass, as a part of a forward and backward pass, until it is measured."""


class Trial(NamedTuple):
    """A forward and backward pass: rows of the micro-batch, and number of recomputed layers."""

    rows: int
    recomputed: int


@dataclass(frozen=True)
class MeasuredPass:
    """Measurement of a pass on the longest rows."""

    trial: Trial
    tokens: int
    """Positions in the batch, padding included."""
    peak_bytes: int | None
    """Peak of all tensors on the device; None if the pass ran out of memory."""
    seconds: float


@dataclass(frozen=True)
class StepChoices:
    """Everything that a plan is chosen from, and what a device has room for."""

    rows_per_step: int
    micro_batches: tuple[int, ...]
    """Possible rows per micro-batch, ascending; each divides `rows_per_step`."""
    configured_rows: int
    layers: int
    fewest_recomputed: int
    most_recomputed: int
    longest_tokens: Mapping[int, int]
    """Positions of the largest micro-batch, by its rows."""
    mean_tokens: Mapping[int, float]
    """Positions of an average micro-batch, by its rows."""
    usable_bytes: int
    """Bytes that tensors may take at the peak of a step."""
    allocated_bytes: int
    """Bytes that are allocated before a pass."""
    later_bytes: int
    """Bytes that a step needs beside a pass, and that are not allocated yet: the state of the optimizer."""


@dataclass(frozen=True)
class Alternative:
    """Memory and time of a micro-batch, with as few recomputed layers as fit."""

    trial: Trial
    needed_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class StepPlan:
    """Chosen plan, what it needs, and the numbers that it was chosen by."""

    rows: int
    accumulation_steps: int
    recomputed: int
    layers: int
    fits: bool
    needed_bytes: int | None
    """Measured peak and the state of the optimizer; None if the pass ran out of memory."""
    usable_bytes: int
    step_seconds: float | None
    """Seconds of a step of average rows; None if no pass was completed."""
    alternatives: tuple[Alternative, ...]
    """The best plan of each other micro-batch that fits."""
    passes: tuple[MeasuredPass, ...]


class StepPlanner:
    """Chooses a plan from measured passes, and which passes to measure.

    Bytes are assumed to be linear in the positions of a batch and in the number of recomputed layers, seconds in both
    too. The plan that follows from that is measured itself before it is chosen, so a wrong assumption costs time, not
    memory.
    """

    def __init__(self, choices: StepChoices) -> None:
        self.choices = choices
        self.passes: list[MeasuredPass] = []

    def add_measurement(self, measured: MeasuredPass) -> None:
        """Take the measurement of a trial."""
        self.passes.append(measured)
        self.__dict__.pop("_model", None)

    def next_trial(self) -> Trial | None:
        """Return the pass to measure next; None if the plan is known."""
        least, most = self.choices.fewest_recomputed, self.choices.most_recomputed
        smallest, *larger = self.choices.micro_batches
        if not larger and not self._is_tried(Trial(smallest, least)):
            return Trial(smallest, least)
        if not larger and self._was_measured_to_fit(Trial(smallest, least)):
            return None
        if not self._is_tried(Trial(smallest, most)):
            return Trial(smallest, most)
        if not self._was_measured_to_fit(Trial(smallest, most)):
            return None
        if (recomputed := self._untried_recomputation(smallest)) is not None:
            return Trial(smallest, recomputed)
        if larger and not any(each.trial.rows > smallest for each in self.passes):
            up_to_configured = [rows for rows in larger if rows <= self.choices.configured_rows] or larger[:1]
            for rows in reversed(up_to_configured):
                if (alternative := self._alternative_of(rows)) is not None:
                    return alternative.trial
            # One size does not show which bytes depend on the rows.
            return Trial(larger[0], most)
        return self._unconfirmed_best() or self._larger_than_predicted() or self._between_measured()

    def best_plan(self) -> StepPlan:
        """Return the fastest of the measured plans that fit; if none does, the smallest one."""
        choices, passes = self.choices, tuple(self.passes)
        confirmed = [
            trial for trial in dict.fromkeys(each.trial for each in passes) if self._was_measured_to_fit(trial)
        ]
        chosen = min(confirmed, key=self._score_trial, default=Trial(choices.micro_batches[0], choices.most_recomputed))
        peak = self._model.measured_peaks.get(chosen)
        others = (self._alternative_of(rows) for rows in choices.micro_batches if rows != chosen.rows)
        return StepPlan(
            rows=chosen.rows,
            accumulation_steps=choices.rows_per_step // chosen.rows,
            recomputed=chosen.recomputed,
            layers=choices.layers,
            fits=bool(confirmed),
            needed_bytes=None if peak is None else peak + choices.later_bytes,
            usable_bytes=choices.usable_bytes,
            step_seconds=self._step_seconds(chosen) if confirmed else None,
            alternatives=tuple(other for other in others if other is not None),
            passes=passes,
        )

    @cached_property
    def _model(self) -> "_PassModel":
        return _PassModel(self.choices, self.passes)

    def _is_tried(self, trial: Trial) -> bool:
        return any(each.trial == trial for each in self.passes)

    def _was_measured_to_fit(self, trial: Trial) -> bool:
        """Return True if the trial was measured, and fits."""
        peak = self._model.measured_peaks.get(trial)
        return peak is not None and peak + self.choices.later_bytes <= self.choices.usable_bytes

    def _untried_recomputation(self, rows: int) -> int | None:
        """Return with how many recomputed layers to measure next, until the bytes of a layer are known.

        Halves what is kept each time that a pass runs out of memory.
        """
        most = self.choices.most_recomputed
        tried = [each for each in self.passes if each.trial.rows == rows and each.trial.recomputed < most]
        if any(each.peak_bytes is not None for each in tried):
            return None
        if not tried:
            return self.choices.fewest_recomputed if self.choices.fewest_recomputed < most else None
        middle = (max(each.trial.recomputed for each in tried) + most + 1) // 2
        return middle if middle < most else None

    def _unconfirmed_best(self) -> Trial | None:
        """Return the fastest plan by prediction, unless it is measured, or hardly faster than a measured one."""
        near = _MOST_GROWTH * max((trial.rows for trial in self._model.measured_peaks), default=0)
        nearby = (rows for rows in self.choices.micro_batches if rows <= near)
        predicted = [plan for rows in nearby if (plan := self._alternative_of(rows)) is not None]
        if not predicted or len(self.passes) >= _MOST_PASSES:
            return None
        best = min((alternative.trial for alternative in predicted), key=self._score_trial)
        return best if not self._is_tried(best) and self._would_gain(best) else None

    def _between_measured(self) -> Trial | None:
        """Return the plan of a size between two measured ones that could be faster than predicted, and than all.

        A small pass waits for the host. A line from there to a large pass, which does not, is too slow for the sizes
        between them: they may take as little time per position as the large one.
        """
        sizes = {trial.rows for trial in self._model.measured_peaks}
        between = [rows for rows in self.choices.micro_batches if min(sizes) < rows < max(sizes)]
        plans = [plan.trial for rows in between if (plan := self._alternative_of(rows)) is not None]
        if not plans or sizes & {*between} or len(self.passes) >= _MOST_PASSES:
            return None
        best = min(plans, key=self._least_score)
        return best if self._least_score(best) < self._best_score() else None

    def _larger_than_predicted(self) -> Trial | None:
        """Return the next larger micro-batch with all layers recomputed, if it would be faster, against predictions.

        Peaks of small micro-batches may be those of the weights, from which larger ones cannot be predicted.
        """
        most_tried = max(each.trial.rows for each in self.passes)
        larger = next((rows for rows in self.choices.micro_batches if rows > most_tried), None)
        if larger is None or len(self.passes) >= _MOST_PASSES:
            return None
        trial = Trial(larger, self.choices.most_recomputed)
        return trial if self._model.may_fit(trial) and self._would_gain(trial) else None

    def _would_gain(self, trial: Trial) -> bool:
        return self._score_trial(trial) * (1 + _NEGLIGIBLE) < self._best_score()

    def _best_score(self) -> float:
        """Return the lowest score of the measured plans that fit."""
        confirmed = [each.trial for each in self.passes if self._was_measured_to_fit(each.trial)]
        return min(map(self._score_trial, confirmed), default=float("inf"))

    def _alternative_of(self, rows: int) -> Alternative | None:
        """Return the plan of a micro-batch that recomputes as little as is measured or predicted to fit."""
        fewest = self._model.fewest_worth_trying(rows)
        for recomputed in range(fewest, self.choices.most_recomputed + 1):
            trial = Trial(rows, recomputed)
            peak = self._model.predict_peak(trial)
            if peak is not None and peak + self.choices.later_bytes <= self.choices.usable_bytes:
                return Alternative(trial, round(peak) + self.choices.later_bytes, self._step_seconds(trial))
        return None

    def _step_seconds(self, trial: Trial) -> float:
        micro_batches = self.choices.rows_per_step // trial.rows
        return micro_batches * self._model.predict_seconds(self.choices.mean_tokens[trial.rows], trial.recomputed)

    def _score_trial(self, trial: Trial) -> float:
        return self._weighted_seconds(trial, self._step_seconds(trial))

    def _least_score(self, trial: Trial) -> float:
        """Return the score of a plan at the lowest time per position of all measured passes."""
        micro_batches = self.choices.rows_per_step // trial.rows
        seconds = self._model.least_seconds(self.choices.mean_tokens[trial.rows], trial.recomputed)
        return self._weighted_seconds(trial, micro_batches * seconds)

    def _weighted_seconds(self, trial: Trial, step_seconds: float) -> float:
        is_configured = trial.rows == self.choices.configured_rows
        return step_seconds * (1 if is_configured else 1 / (1 - LEAST_GAIN))


class _PassModel:
    """Bytes and seconds of any pass, from those that were measured."""

    def __init__(self, choices: StepChoices, passes: list[MeasuredPass]) -> None:
        self._choices = choices
        self._failed = [each.trial for each in passes if each.peak_bytes is None]
        self._measured = [each for each in passes if each.peak_bytes is not None]
        self.measured_peaks: dict[Trial, int] = {}
        for each in self._measured:
            peak = each.peak_bytes or 0
            self.measured_peaks[each.trial] = max(peak, self.measured_peaks.get(each.trial, 0))
        self._saved = self._bytes_saved_per_token_and_layer()
        self._again = self._recomputed_part()

    def predict_peak(self, trial: Trial) -> float | None:
        """Return the peak of a pass; None if it is unknown, or more than there is."""
        if trial in self.measured_peaks:
            return self.measured_peaks[trial]
        if not self.may_fit(trial):
            return None
        if any(other.rows == trial.rows for other in self.measured_peaks):
            return self._peak_of_measured_rows(trial)
        points = sorted(self._peaks_at(trial.recomputed))
        if not points:
            return None
        tokens, bytes_ = points[-1]
        less_tokens, less_bytes = points[-2] if len(points) > 1 else (0, float(self._choices.allocated_bytes))
        slope = max(bytes_ - less_bytes, 0.0) / max(tokens - less_tokens, 1)
        return bytes_ + (self._choices.longest_tokens[trial.rows] - tokens) * slope

    def may_fit(self, trial: Trial) -> bool:
        """Return False if a pass that needs no more has run out of memory."""
        return not any(failed.rows <= trial.rows and failed.recomputed >= trial.recomputed for failed in self._failed)

    def fewest_worth_trying(self, rows: int) -> int:
        """Return the fewest recomputed layers to consider: halfway to all, once a prediction was too low."""
        fewest, most = self._choices.fewest_recomputed, self._choices.most_recomputed
        failed = [trial.recomputed for trial in self._failed if trial.rows == rows]
        if not failed or any(trial.rows == rows for trial in self.measured_peaks):
            return fewest
        return (max(failed) + most + 1) // 2

    def _peaks_at(self, recomputed: int) -> Iterator[tuple[int, float]]:
        """Yield positions and peak of each measured micro-batch with this number of recomputed layers."""
        for rows in {trial.rows for trial in self.measured_peaks}:
            if (peak := self._peak_of_measured_rows(Trial(rows, recomputed))) is not None:
                yield self._choices.longest_tokens[rows], peak

    def _peak_of_measured_rows(self, trial: Trial) -> float | None:
        """Return the peak by those of the same micro-batch with fewer and more recomputed layers.

        The peak falls ever less, the more layers are recomputed, so a line between two of them is never below it.
        """
        peaks = {other.recomputed: peak for other, peak in self.measured_peaks.items() if other.rows == trial.rows}
        fewer = max((layers for layers in peaks if layers <= trial.recomputed), default=None)
        more = min((layers for layers in peaks if layers >= trial.recomputed), default=None)
        if fewer is not None and more is not None:
            part = (trial.recomputed - fewer) / max(more - fewer, 1)
            return peaks[fewer] + part * (peaks[more] - peaks[fewer])
        if self._saved is None:
            return None
        nearest = min(peaks, key=lambda layers: abs(layers - trial.recomputed))
        return peaks[nearest] + (nearest - trial.recomputed) * self._saved * self._choices.longest_tokens[trial.rows]

    def _bytes_saved_per_token_and_layer(self) -> float | None:
        by_rows = self._pairs_of_one_micro_batch()
        if not by_rows:
            return None
        fewer, more = by_rows[-1]
        saved = self.measured_peaks[fewer.trial] - self.measured_peaks[more.trial]
        layers = more.trial.recomputed - fewer.trial.recomputed
        return max(saved, 0) / (layers * self._choices.longest_tokens[fewer.trial.rows])

    def _pairs_of_one_micro_batch(self) -> list[tuple[MeasuredPass, MeasuredPass]]:
        """Return for each micro-batch its passes with the fewest and the most recomputed layers, if they differ."""
        pairs = []
        for rows in sorted({each.trial.rows for each in self._measured}):
            same = sorted((each for each in self._measured if each.trial.rows == rows), key=lambda each: each.trial)
            if same[0].trial.recomputed < same[-1].trial.recomputed:
                pairs.append((same[0], same[-1]))
        return pairs

    def predict_seconds(self, tokens: float, recomputed: int) -> float:
        """Return the seconds of a pass over so many positions: a line between the measured ones next to it."""
        points = self._plain_seconds()
        if not points:
            return float("inf")
        after = next((index for index, (positions, _) in enumerate(points) if positions >= tokens), len(points) - 1)
        after = min(max(after, 1), len(points) - 1)
        (fewest, least), (most, longest) = points[max(after - 1, 0)], points[after]
        slope = (longest - least) / (most - fewest) if most > fewest else longest / most
        fixed = longest - slope * most
        if fixed < 0:  # a longer batch takes more than its share, or the times vary
            slope, fixed = longest / most, 0.0
        return max(fixed + slope * tokens, 0.0) * self._recompute_factor(recomputed)

    def least_seconds(self, tokens: float, recomputed: int) -> float:
        """Return the seconds of a pass that takes as little time per position as any measured one.

        Recomputation is assumed to cost what it does at least where passes do not wait for the host.
        """
        part = max(self._again, _RECOMPUTED_PART) / max(self._choices.layers, 1)
        plain = ((each.seconds / (1 + part * each.trial.recomputed), each.tokens) for each in self._measured)
        least = min((seconds / positions for seconds, positions in plain), default=float("inf"))
        return least * tokens * (1 + part * recomputed)

    def _plain_seconds(self) -> list[tuple[int, float]]:
        """Return positions and seconds of each measured size, without recomputation, ascending."""
        seconds: dict[int, float] = {}
        for each in self._measured:
            plain = each.seconds / self._recompute_factor(each.trial.recomputed)
            seconds[each.tokens] = min(plain, seconds.get(each.tokens, plain))
        return sorted(seconds.items())

    def _recompute_factor(self, recomputed: int) -> float:
        return 1 + self._again * recomputed / max(self._choices.layers, 1)

    def _recomputed_part(self) -> float:
        """Return the time of recomputing all layers, as a part of a pass that recomputes none."""
        pairs = self._pairs_of_one_micro_batch()
        if not pairs:
            return _RECOMPUTED_PART
        fewer, more = pairs[-1]
        ratio = more.seconds / max(fewer.seconds, 1e-9)
        layers = max(self._choices.layers, 1)
        difference = (more.trial.recomputed - ratio * fewer.trial.recomputed) / layers
        return min(max((ratio - 1) / difference, 0.0), 1.0) if difference > 0 else _RECOMPUTED_PART


def micro_batches(rows_per_step: int, at_most: int) -> tuple[int, ...]:
    """Return the divisors of a step's rows, up to a limit that is at least 1."""
    return tuple(rows for rows in range(1, min(rows_per_step, at_most) + 1) if rows_per_step % rows == 0)

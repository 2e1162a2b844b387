"""Anomaly guard: detects bad steps before they change a weight, names their rows, and lets other attempts skip them."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anneal.contracts.attempt.messages import AnomalyDetails, RepairProposal
from anneal.contracts.attempt.repair import Repair
from anneal.contracts.training_config.fields import TrainingConfig
from worker.training.checkpointing.saver import SavingTrainer
from worker.training.failures import TrainingFailure
from worker.training.model.parallel.sharding import local_part

REMEMBERED = 64
"""Number of step losses from which the noise of the loss is estimated."""
_WINDOW = 16
"""Number of losses whose median is the usual loss; with fewer, nothing is a spike, as a loss moves fast at first."""
_MIN_SPREAD = 0.01
"""Fraction of the usual loss, so that a tiny change of a loss that hardly moves is no spike."""
_DISTANCE_TO_SIGMA = 1.4826 / math.sqrt(2)
"""Factor from the median distance between neighbors to the standard deviation, for normally distributed values."""
_ROWS_NAMED = 20

Kind = Literal["non_finite", "loss_spike"]
_CODES: dict[Kind, str] = {"non_finite": "non_finite_loss", "loss_spike": "loss_spike"}


@dataclass(frozen=True)
class Anomaly:
    """Anomaly of a step."""

    kind: Kind
    says: str
    """Clause that describes it, such as `the loss became nan`."""
    limit: float = math.inf
    """Losses above this are anomalous."""
    is_of_gradients: bool = False
    """True if the loss is finite, and the gradients are not."""


class AnomalyGuard:
    """Checks the steps of one attempt, and knows which of them earlier attempts found to be bad."""

    def __init__(self, config: TrainingConfig, repairs: Sequence[Repair]) -> None:
        options = config.trainer_options
        self._policies = {"non_finite": config.on_non_finite, "loss_spike": config.on_spike}
        self._threshold = options.spike_threshold
        self._max_rewinds = options.max_rewinds
        earlier = [one for one in repairs if one.kind in _CODES]
        self._rewinds = len(earlier)
        self._steps = {one.step for one in earlier}
        self._rows = {row for one in earlier for row in one.singled_out}

    def take_over(self, rows: Iterable[int]) -> None:
        """Add the bad rows found by the run from whose checkpoint this one continues."""
        self._rows.update(rows)

    @property
    def bad_rows(self) -> list[int]:
        """Rows that no step may contain, for runs that resume from a checkpoint."""
        return sorted(self._rows)

    @property
    def may_skip(self) -> bool:
        """True if an earlier attempt has found a bad step or row; the same on all ranks."""
        return bool(self._steps or self._rows)

    def skips_step(self, step: int, rows: Iterable[int]) -> bool:
        """Return True if `step`, made of these rows, was found to be bad or contains a bad row."""
        return step in self._steps or (bool(self._rows) and not self._rows.isdisjoint(rows))

    def judge_step(self, loss: float, norm: float | None, recent: Sequence[float]) -> Anomaly | None:
        """Return the anomaly of a step with this loss and gradient norm, if any, given the losses of `recent` steps."""
        if not math.isfinite(loss):
            return Anomaly("non_finite", f"the loss became {loss}")
        if norm is not None and not math.isfinite(norm):
            says = f"the gradients became {norm} (loss {loss:.4g})"
            return Anomaly("non_finite", says, _loss_limit(recent, self._threshold), is_of_gradients=True)
        if self._policies["loss_spike"] == "ignore" or len(recent) < _WINDOW:
            return None
        limit = _loss_limit(recent, self._threshold)
        if loss <= limit:
            return None
        usual = statistics.median(recent[-_WINDOW:])
        return Anomaly("loss_spike", f"the loss spiked to {loss:.4g}, where {usual:.4g} is usual", limit)

    def build_failure(self, trainer: SavingTrainer, trouble: Anomaly) -> TrainingFailure:
        """Build the failure that ends the attempt: the bad rows, and a repair if another attempt may skip the step."""
        step, rows = trainer.state.global_step + 1, sorted(set(trainer.step_rows))
        singled_out = _anomalous_rows(trainer, trouble, rows)
        summary = f"At step {step} {trouble.says}. {_describe_rows(rows, singled_out)}"
        wants, field = self._policies[trouble.kind] == "rewind", f"on_{trouble.kind.removeprefix('loss_')}"
        code, details = (
            _CODES[trouble.kind],
            AnomalyDetails(summary=summary, in_evaluation=False, singled_out=singled_out),
        )
        if not wants:
            kept_step = trainer.saving.kept_step
            again, back = (
                ("Resumed", f"the checkpoint of step {kept_step}") if kept_step else ("Created again", "its start")
            )
            return TrainingFailure(
                code,
                f'{summary} Look at these rows, or lower `learning_rate`. {again} with `{field}` set to "rewind", a '
                f"run goes back to {back} by itself and skips such steps.",
                details=details,
            )
        if self._rewinds >= self._max_rewinds:
            return TrainingFailure(
                code,
                f"{summary} The run has gone back {self._rewinds} times already, the maximum set by "
                "`extra.max_rewinds`. Look at these rows, or lower `learning_rate`.",
                details=details,
            )
        repair: RepairProposal = {
            "kind": trouble.kind,
            "step": step,
            "rows": rows[:_ROWS_NAMED],
            "singled_out": singled_out,
        }
        return TrainingFailure(code, summary, repair, details)


def _loss_limit(recent: Sequence[float], threshold: float) -> float:
    if len(recent) < _WINDOW:
        return math.inf
    usual = statistics.median(recent[-_WINDOW:])
    # Differences between neighbors: a loss that falls, as it should, is not noise.
    spread = _DISTANCE_TO_SIGMA * statistics.median(abs(later - loss) for loss, later in itertools.pairwise(recent))
    return usual + threshold * max(spread, _MIN_SPREAD * abs(usual))


def _describe_rows(rows: list[int], singled_out: list[int]) -> str:
    def list_rows(some: list[int]) -> str:
        more = f" and {len(some) - _ROWS_NAMED} more" if len(some) > _ROWS_NAMED else ""
        return f"{'row' if len(some) == 1 else 'rows'} {', '.join(map(str, some[:_ROWS_NAMED]))}{more}"

    if not rows:
        return "The rows of the step are not known."
    counted = "of the dataset (counted from 0)"
    if not singled_out:
        return f"It contains {list_rows(rows)} {counted}; none of them stands out."
    stand = "stands" if len(singled_out) == 1 else "stand"
    return f"Of its {len(rows)} rows, {list_rows(singled_out)} {counted} {stand} out when put through the model alone."


def _anomalous_rows(trainer: SavingTrainer, trouble: Anomaly, rows: list[int]) -> list[int]:
    """Return the rows that are anomalous by themselves, as far as a row can be put through the model alone.

    Returns none if most are: then the weights are at fault and not the rows. Of a packed sequence, all rows are named.
    """
    anomalous_rows: set[int] = set()
    sequences = trainer.sequences_of(rows)
    anomalous = 0
    for sequence in sequences:
        trainer.run.report.alive()
        loss, has_finite_gradients = _evaluate_sequence(trainer, sequence, trouble.is_of_gradients)
        if not math.isfinite(loss) or loss > trouble.limit or not has_finite_gradients:
            anomalous += 1
            anomalous_rows.update(sequence["rows"])
    most = len(sequences) > 1 and anomalous * 2 > len(sequences)
    return [] if most else sorted(anomalous_rows & set(rows))


def _evaluate_sequence(trainer: SavingTrainer, sequence: dict[str, Any], with_gradients: bool) -> tuple[float, bool]:
    """Return the loss of one sequence without dropout, and True if its gradients are finite or were not requested."""
    run = trainer.run
    model: Any = trainer.model
    inputs = trainer._prepare_inputs(trainer.data_collator([sequence]))
    trainer.take_rows(inputs)
    trains = model.training
    model.eval()
    model.zero_grad()  # before the pass, in which a sharded model has whole copies of some parameters
    try:
        with (
            run.ranks.alone(),
            torch.set_grad_enabled(with_gradients),
            trainer.compute_loss_context_manager(),
        ):
            loss = trainer.compute_loss(model, inputs)
        if with_gradients:
            loss.backward()
            gradients = [local_part(one.grad) for one in model.parameters() if one.grad is not None]
            are_finite = all(bool(torch.isfinite(one).all()) for one in gradients)
            # Rank 0 looks alone, unless each rank has only a part of the gradients.
            if run.is_sharded:
                are_finite = all(run.ranks.gather_values(are_finite))
            return float(loss.item()), are_finite
        return float(loss.item()), True
    finally:
        model.train(trains)

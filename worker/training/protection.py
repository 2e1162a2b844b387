"""Steps that go wrong: seen before they change a weight, their rows named, and passed over by the next attempt."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from app.runs.config import TrainingConfig
from worker.training.failures import TrainingFailure

if TYPE_CHECKING:
    from worker.training.trainer import Faithful

REMEMBERED = 64
"""Losses of steps from which the noise of the loss is known."""
_LATEST = 16
"""Losses of which the median is the usual one; with fewer nothing counts as a leap, as a loss moves fast at first."""
_LEAST_SPREAD = 0.01
"""Of the usual loss: one that hardly moves must not make a leap of the slightest change."""
_TO_ONE_SIGMA = 1.4826 / math.sqrt(2)
"""What makes a standard deviation of the median distance between neighbours, where the numbers are normal."""
_ROWS_NAMED = 20

Kind = Literal["non_finite", "loss_spike"]
_CODES: dict[Kind, str] = {"non_finite": "non_finite_loss", "loss_spike": "loss_spike"}


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a step."""

    kind: Kind
    says: str
    """A sentence without its end, such as `the loss became nan`."""
    limit: float = math.inf
    """A loss above this is out of the ordinary."""
    is_of_gradients: bool = False
    """The loss is a number, and its gradients are not."""


class Guard:
    """Watches the steps of one attempt, and knows which of them earlier attempts have found to be bad."""

    def __init__(self, config: TrainingConfig, job: dict[str, Any]) -> None:
        options = config.trainer_options
        self._policies = {"non_finite": config.on_non_finite, "loss_spike": config.on_spike}
        self._threshold = options.spike_threshold
        self._most = options.max_rewinds
        earlier = [one for one in job.get("repairs", ()) if one["kind"] in _CODES]
        self._rewinds = len(earlier)
        self._steps = {int(one["step"]) for one in earlier}
        self._rows = {int(row) for one in earlier for row in one["singled_out"]}

    def take_over(self, rows: Iterable[int]) -> None:
        """Rows that a run found to be bad from whose checkpoint this one goes on."""
        self._rows.update(rows)

    @property
    def bad_rows(self) -> list[int]:
        """Rows that no step may hold, for whoever goes on from a checkpoint."""
        return sorted(self._rows)

    def passes_over(self, step: int, rows: Iterable[int]) -> bool:
        """Whether `step`, made of these rows, was found to be bad, or holds a row that was."""
        return step in self._steps or (bool(self._rows) and not self._rows.isdisjoint(rows))

    def judge(self, loss: float, norm: float | None, recent: Sequence[float]) -> Trouble | None:
        """What is wrong with a step of this loss and gradient norm, after steps with the losses `recent`."""
        if not math.isfinite(loss):
            return Trouble("non_finite", f"the loss became {loss}")
        if norm is not None and not math.isfinite(norm):
            says = f"the gradients became {norm} (loss {loss:.4g})"
            return Trouble("non_finite", says, _limit(recent, self._threshold), is_of_gradients=True)
        if self._policies["loss_spike"] == "ignore" or len(recent) < _LATEST:
            return None
        limit = _limit(recent, self._threshold)
        if loss <= limit:
            return None
        usual = statistics.median(recent[-_LATEST:])
        return Trouble("loss_spike", f"the loss leapt to {loss:.4g}, where {usual:.4g} is usual", limit)

    def failure(self, trainer: "Faithful", trouble: Trouble) -> TrainingFailure:
        """What the attempt ends with: it names the rows, and says whether another attempt may pass over the step."""
        step, rows = trainer.state.global_step + 1, sorted(set(trainer.step_rows))
        culprits = _culprits(trainer, trouble, rows)
        told = f"At step {step} {trouble.says}. {_named(rows, culprits)}"
        wants, field = self._policies[trouble.kind] == "rewind", f"on_{trouble.kind.removeprefix('loss_')}"
        code = _CODES[trouble.kind]
        if not wants:
            kept = trainer.saving.kept_step
            again, back = ("Resumed", f"the checkpoint of step {kept}") if kept else ("Posted again", "its start")
            return TrainingFailure(
                code,
                f'{told} Look at these rows, or lower `learning_rate`. {again} with `{field}` set to "rewind", a run '
                f"goes back to {back} by itself and passes over such steps.",
            )
        if self._rewinds >= self._most:
            return TrainingFailure(
                code,
                f"{told} The run has gone back {self._rewinds} times already, which is all that `extra.max_rewinds` "
                "allows. Look at these rows, or lower `learning_rate`.",
            )
        repair = {"kind": trouble.kind, "step": step, "rows": rows[:_ROWS_NAMED], "singled_out": culprits}
        return TrainingFailure(code, told, repair)


def _limit(recent: Sequence[float], threshold: float) -> float:
    if len(recent) < _LATEST:
        return math.inf
    usual = statistics.median(recent[-_LATEST:])
    # Between neighbours: a loss that falls, as it should, is not noise.
    spread = _TO_ONE_SIGMA * statistics.median(abs(later - loss) for loss, later in itertools.pairwise(recent))
    return usual + threshold * max(spread, _LEAST_SPREAD * abs(usual))


def _named(rows: list[int], culprits: list[int]) -> str:
    def those(some: list[int]) -> str:
        more = f" and {len(some) - _ROWS_NAMED} more" if len(some) > _ROWS_NAMED else ""
        return f"{'row' if len(some) == 1 else 'rows'} {', '.join(map(str, some[:_ROWS_NAMED]))}{more}"

    if not rows:
        return "The rows of the step are not known."
    counted = "of the data set (counted from 0)"
    if not culprits:
        return f"It was made of {those(rows)} {counted}; none of them stands out."
    stand = "stands" if len(culprits) == 1 else "stand"
    return f"Of its {len(rows)} rows {those(culprits)} {counted} {stand} out when put through the model alone."


def _culprits(trainer: "Faithful", trouble: Trouble, rows: list[int]) -> list[int]:
    """Rows that go wrong by themselves, as far as a row can be put through the model alone.

    None when most do: then it is the weights and not the rows. Of a packed sequence all rows are named.
    """
    found: set[int] = set()
    sequences = trainer.sequences_of(rows)
    guilty = 0
    for sequence in sequences:
        trainer.run.report.alive()
        loss, has_finite_gradients = _alone(trainer, sequence, trouble.is_of_gradients)
        if not math.isfinite(loss) or loss > trouble.limit or not has_finite_gradients:
            guilty += 1
            found.update(sequence["rows"])
    most = len(sequences) > 1 and guilty * 2 > len(sequences)
    return [] if most else sorted(found & set(rows))


def _alone(trainer: "Faithful", sequence: dict[str, Any], with_gradients: bool) -> tuple[float, bool]:
    """Loss of one sequence without dropout, and whether its gradients are finite (true where nobody asks)."""
    model: Any = trainer.model
    inputs = trainer._prepare_inputs(trainer.data_collator([sequence]))
    trainer.take_rows(inputs)
    trains = model.training
    model.eval()
    try:
        with torch.set_grad_enabled(with_gradients), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        if with_gradients:
            model.zero_grad()
            loss.backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            return float(loss.item()), all(bool(torch.isfinite(one).all()) for one in gradients)
        return float(loss.item()), True
    finally:
        model.train(trains)

"""Direct preference optimization (`dpo`): pairs of a better and a worse answer, and a frozen reference model."""

from typing import Any

from trl import DPOTrainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.methods import reference
from worker.training.methods.pairs import PairMixin, train_on_pairs
from worker.training.methods.reference import ReferenceMixin


class PreferenceTrainer(PairMixin, ReferenceMixin, DPOTrainer):  # type: ignore[misc]
    """A trainer on tokenized pairs; `DPOTrainer.compute_loss` of TRL computes the loss."""


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""

    def loss_options() -> dict[str, Any]:
        options = run.config.dpo
        return {
            "beta": options.beta,
            "loss_type": [options.loss_type],
            "label_smoothing": options.label_smoothing,
            "precompute_ref_log_probs": reference.is_precomputed(run),
        }

    return train_on_pairs(run, replaced, PreferenceTrainer, loss_options)

"""Reference model of the methods that compare with it: when its log-probabilities are computed, and the progress."""

from typing import Any

import torch
from datasets import Dataset

from worker.training.context import TrainingContext
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import preparation


def is_precomputed(run: TrainingContext) -> bool:
    """Return True if the reference log-probabilities are computed once, before the first step.

    Without an adapter the alternative is a second copy of the model. With an adapter it is a forward pass in every
    step, which is more work from the second epoch on.
    """
    return run.config.lora_r is None or preparation.configured_steps(run) > run.steps_per_epoch


class ReferenceMixin(ServiceTrainerMixin):
    """Mixin for TRL's trainers with reference log-probabilities on tokenized rows; it reports their progress."""

    def has_reference_pass(self) -> bool:
        return not self.precompute_ref_logps

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        self._reference_done, self._reference_rows = 0, len(dataset)
        rows = f"{len(dataset)} {self.run.method.row_noun}"
        self.run.report.message(f"Computing the reference log-probabilities of {rows} ({name}).")
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        self._reference_done += len(inputs["input_ids"]) // (2 if self.run.method.has_pairs else 1)
        self.run.report.alive()
        self.run.progress("loading", self._reference_done, self._reference_rows)
        return super().compute_ref_log_probs(model, inputs)

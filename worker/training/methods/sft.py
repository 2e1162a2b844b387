"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`) on chats, prompts with completions, or texts."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from trl import SFTConfig, SFTTrainer

from app.contracts.attempt.messages import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.dataset import Tokens
from worker.training.data.reader import RowSource
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation


class SupervisedTrainer(ServiceTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """A trainer on tokenized data; `SFTTrainer.compute_loss` of TRL computes the loss, also that of `qlora`."""

    MEASURES: ClassVar[Mapping[str, str]] = {"mean_token_accuracy": "token_accuracy", "entropy": "entropy"}

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        batch = self._prepare_inputs(inputs) | {"use_cache": False}
        labels = batch.pop("labels")
        self.own_metrics.update(model(**batch).logits, labels)

    def eval_terms(self, inputs: Any) -> int:
        return int((inputs["labels"][:, 1:] != -100).sum())  # the first token of a sequence is never predicted

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = super().evaluated(metrics)
        reported["eval_perplexity"] = math.exp(min(reported["eval_loss"], 700.0))
        return reported


def train(
    run: TrainingContext, replaced: list[Replacement], trainer_class: type[SupervisedTrainer] = SupervisedTrainer
) -> TrainingResult:
    """Train one run on examples; result and errors are those of `pipeline.train_on_tokens`.

    A recipe installed by the operator may pass another trainer class.
    """
    setup = preparation.prepare_start(run, replaced)
    max_length, config = setup.max_length, run.config
    if "chat" in {one.format for one in run.job.datasets}:
        preparation.chat_template(run, setup.tokenizer)

    def read(rows: RowSource) -> Tokens:
        return dataset.tokenize(
            rows.path, rows.format, setup.tokenizer, config, max_length=max_length, chosen=rows.chosen,
            purpose=rows.purpose, progress=rows.progress, sha256=rows.sha256, cache=rows.cache,
        )  # fmt: skip

    def arguments(shared: dict[str, Any]) -> SFTConfig:
        return SFTConfig(
            **shared,
            neftune_noise_alpha=config.neftune_noise_alpha,
            max_length=max_length,
            packing=config.packing,
            packing_strategy=config.trainer_options.packing_strategy,
            dataset_kwargs={"skip_prepare_dataset": True},
        )

    return pipeline.train_on_tokens(run, replaced, setup, read, trainer_class, arguments)

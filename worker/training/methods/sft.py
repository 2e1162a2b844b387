"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`) on chats, prompts with completions, or texts."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from trl import SFTConfig, SFTTrainer

from app.contracts.attempt.messages import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.dataset import Tokens
from worker.training.data.reader import RowSource
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.plugins import metric_functions
from worker.training.plugins.metric_functions import Evaluation, Factories


class SupervisedTrainer(ServiceTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """A trainer on tokenized data; `SFTTrainer.compute_loss` of TRL computes the loss, also that of `qlora`."""

    MEASURES: ClassVar[Mapping[str, str]] = {"mean_token_accuracy": "token_accuracy", "entropy": "entropy"}

    def __init__(self, run: TrainingContext, metric_functions: Factories, **options: Any) -> None:
        self._factories = metric_functions
        self._evaluation = Evaluation({})
        super().__init__(run, **options)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        self._evaluation = Evaluation(self._factories)
        return super().evaluate(*args, **options)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().prediction_step(model, inputs, *args, **options)
        if self._factories:
            # The loss is computed without the logits of a whole batch, so metrics need another forward pass.
            batch = self._prepare_inputs(inputs) | {"use_cache": False}
            labels = batch.pop("labels")
            with torch.no_grad(), self.compute_loss_context_manager():
                self._evaluation.update(model(**batch).logits, labels)
        return found

    def eval_terms(self, inputs: Any) -> int:
        return int((inputs["labels"][:, 1:] != -100).sum())  # the first token of a sequence is never predicted

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = super().evaluated(metrics)
        reported["eval_perplexity"] = math.exp(min(reported["eval_loss"], 700.0))
        return {**reported, **self._evaluation.results(reported)}


def train(
    run: TrainingContext, replaced: list[Replacement], trainer_class: type[SupervisedTrainer] = SupervisedTrainer
) -> TrainingResult:
    """Train one run on examples; result and errors are those of `pipeline.train_on_tokens`.

    A recipe installed by the operator may pass another trainer class.
    """
    functions = metric_functions.load(run.config.trainer_options.metrics)
    setup = preparation.prepare_start(run, replaced)
    max_length, config = setup.max_length, run.config
    if "chat" in {one.format for one in (run.job.dataset, run.job.eval_dataset) if one}:
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

    make = partial(trainer_class, metric_functions=functions)
    return pipeline.train_on_tokens(run, replaced, setup, read, make, arguments)

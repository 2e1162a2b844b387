"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`): data → model → trainer → run info → train → export."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from trl import SFTConfig, SFTTrainer

from app.contracts.job import DataSource
from app.contracts.trainer import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.dataset import Tokens
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.model import loader, memory_plan
from worker.training.plugins import metric_functions
from worker.training.plugins.metric_functions import Evaluation, Factories


class SupervisedTrainer(ServiceTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """An `SFTTrainer` on tokenized data; the loss, also of `qlora`, is that of TRL."""

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

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = super().evaluated(metrics)
        reported["eval_perplexity"] = math.exp(min(reported["eval_loss"], 700.0))
        return {**reported, **self._evaluation.results(reported)}


def train(
    run: TrainingContext, replaced: list[Replacement], trainer_class: type[SupervisedTrainer] = SupervisedTrainer
) -> TrainingResult:
    """Train one run to its end or to a stop, and return the fields of its result record.

    A recipe installed by the operator may pass another trainer class.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    functions = metric_functions.load(run.config.trainer_options.metrics)
    found, tokenizer = preparation.prepare_start(run)
    max_length = preparation.max_sequence_length(run, found, tokenizer, replaced)
    config = run.config
    if "chat" in {one.format for one in (run.job.dataset, run.job.eval_dataset) if one}:
        preparation.chat_template(run, tokenizer)

    cache = preparation.token_cache(run)

    def read(source: DataSource, chosen: list[int] | None, purpose: preparation.Purpose) -> Tokens:
        return dataset.tokenize(
            str(source.path), source.format, tokenizer, config, max_length=max_length, chosen=chosen,
            purpose=purpose, progress=preparation.tokenizing(run), sha256=source.sha256, cache=cache,
        )  # fmt: skip

    training, held_out = preparation.read_data(run, read)
    tokenized = preparation.cache_messages(run, training, held_out)
    total_steps = preparation.total_steps(run, dataset.steps_per_epoch(training.dataset, config))
    memory_plan.choose_checkpointing(run, replaced, found, training.dataset, max_length)
    with preparation.base_weights(run, found) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, training, held_out))
        trainer = pipeline.build(
            trainer_class,
            run,
            metric_functions=functions,
            model=network,
            args=SFTConfig(
                **pipeline.trainer_arguments(run, total_steps),
                neftune_noise_alpha=config.neftune_noise_alpha,
                max_length=max_length,
                packing=config.packing,
                packing_strategy=config.trainer_options.packing_strategy,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=preparation.training_rows(run, training),
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=loader.lora_config(config, start.revision),
        )
        facts = pipeline.report_run_info(
            trainer, found, replaced, training, held_out, max_length=max_length, **tokenized
        )
        pipeline.train(trainer)
        return pipeline.finish(trainer, start, facts)

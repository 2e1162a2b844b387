"""Reward models (`reward`): pairs → model with a scalar head → trainer → run info → train → export."""

from collections.abc import Mapping
from typing import ClassVar

from trl import RewardConfig, RewardTrainer

from app.contracts.job import DataSource
from app.contracts.trainer import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset, preferences
from worker.training.data.preferences import Pairs
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.model import loader, memory_plan


class RewardModelTrainer(ServiceTrainerMixin, RewardTrainer):  # type: ignore[misc]
    """A `RewardTrainer` on tokenized pairs."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "accuracy": "preference_accuracy",
        "margin": "reward_margin",
        "mean_reward": "reward_mean",
        "min_reward": "reward_min",
        "max_reward": "reward_max",
    }

    def usual_length(self, tokens_of_a_row: float) -> float:
        return tokens_of_a_row / 2


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run to its end or to a stop, and return the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    found, tokenizer = preparation.prepare_start(run)
    max_length = preparation.max_sequence_length(run, found, tokenizer, replaced)
    no_dropout = preparation.must_disable_dropout(run, replaced)
    preparation.chat_template_if_needed(run, tokenizer)
    config = run.config

    cache = preparation.token_cache(run)

    def read(source: DataSource, chosen: list[int] | None, purpose: preparation.Purpose) -> Pairs:
        return preferences.read_comparisons(
            preparation.pair_source(run, cache, source, chosen, purpose), tokenizer, max_length=max_length
        )

    training, held_out = preparation.read_data(run, read)
    tokenized = preparation.cache_messages(run, training, held_out)
    total_steps = preparation.total_steps(run, dataset.steps_per_epoch(training.dataset, config))
    memory_plan.choose_checkpointing(run, replaced, found, training.dataset, max_length)
    with preparation.base_weights(run, found) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, training, held_out), "reward")
        trainer = pipeline.build(
            RewardModelTrainer,
            run,
            model=network,
            args=RewardConfig(
                **pipeline.trainer_arguments(run, total_steps),
                max_length=None,  # pairs that are too long have been left out
                disable_dropout=no_dropout,
            ),
            train_dataset=preparation.training_rows(run, training),
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=loader.lora_config(config, start.revision, "reward"),
        )
        facts = pipeline.report_run_info(
            trainer, found, replaced, training, held_out, max_length=max_length, **tokenized
        )
        pipeline.train(trainer)
        return pipeline.finish(trainer, start, facts)

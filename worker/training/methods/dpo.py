"""Direct preference optimization (`dpo`): pairs → model → trainer → run info → train → export."""

import uuid
from collections.abc import Mapping
from typing import ClassVar

from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from app.contracts.job import DataSource
from app.contracts.trainer import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset as data
from worker.training.data import preferences
from worker.training.data.preferences import Pairs
from worker.training.methods import pipeline, preparation, reference
from worker.training.methods.reference import ReferenceMixin
from worker.training.model import loader, memory_plan

# TRL names its file of reference log-probabilities by a hash of the weights, which takes minutes for gigabytes. The
# folder belongs to this process alone, so a random name is enough.
dpo_trainer.hash_module = lambda _module: uuid.uuid4().hex


class PreferenceTrainer(ReferenceMixin, DPOTrainer):  # type: ignore[misc]
    """A `DPOTrainer` on tokenized pairs."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "rewards/accuracies": "preference_accuracy",
        "rewards/margins": "reward_margin",
        "rewards/chosen": "reward_chosen",
        "rewards/rejected": "reward_rejected",
        "logps/chosen": "logps_chosen",
        "logps/rejected": "logps_rejected",
        "mean_token_accuracy": "token_accuracy",
        "entropy": "entropy",
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
        rows = preparation.pair_source(run, cache, source, chosen, purpose)
        return preferences.read_preferences(
            rows, tokenizer, max_length=max_length, truncation_mode=config.truncation_mode
        )

    training, held_out = preparation.read_data(run, read)
    tokenized = preparation.cache_messages(run, training, held_out)
    steps_per_epoch = data.steps_per_epoch(training.dataset, config)
    total_steps = preparation.total_steps(run, steps_per_epoch)
    memory_plan.choose_checkpointing(run, replaced, found, training.dataset, max_length)
    with preparation.base_weights(run, found) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, training, held_out))
        trainer = pipeline.build(
            PreferenceTrainer,
            run,
            model=network,
            args=DPOConfig(
                **pipeline.trainer_arguments(run, total_steps),
                beta=config.dpo.beta,
                loss_type=[config.dpo.loss_type],
                label_smoothing=config.dpo.label_smoothing,
                max_length=max_length,
                truncation_mode=config.truncation_mode,
                disable_dropout=no_dropout,
                precompute_ref_log_probs=reference.is_precomputed(run, steps_per_epoch),
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

"""Kahneman-Tversky optimization (`kto`): rated answers → model → trainer → run info → train → export."""

import uuid
from collections.abc import Mapping
from typing import ClassVar

from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer

from app.contracts.job import DataSource
from app.contracts.trainer import TrainingResult
from app.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset as data
from worker.training.data.preferences import Pairs
from worker.training.data.rated_answers import rated_answers
from worker.training.methods import pipeline, preparation, reference
from worker.training.methods.reference import ReferenceMixin
from worker.training.model import loader, memory_plan

# As in `dpo`: TRL names its file of reference log-probabilities by a slow hash of the weights.
kto_trainer.hash_module = lambda _module: uuid.uuid4().hex


class RatedAnswerTrainer(ReferenceMixin, KTOTrainer):  # type: ignore[misc]
    """A `KTOTrainer` on tokenized rows."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "kl": "kl",
        "rewards/margins": "reward_margin",
        "rewards/chosen": "reward_desirable",
        "rewards/rejected": "reward_undesirable",
        "logps/chosen": "logps_desirable",
        "logps/rejected": "logps_undesirable",
        "entropy": "entropy",
    }
    NOT_COUNTED = "forward passes that estimate the KL term"


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run to its end or to a stop, and return the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    found, tokenizer = preparation.prepare_start(run)
    max_length = preparation.longest(run, found, tokenizer, replaced)
    no_dropout = preparation.no_dropout(run, replaced)
    preparation.chat_template_if_needed(run, tokenizer)
    config = run.config

    cache = preparation.token_cache(run)

    def read(source: DataSource, chosen: list[int] | None, purpose: preparation.Purpose) -> Pairs:
        rows = preparation.pairs_of(run, cache, source, chosen, purpose)
        return rated_answers(rows, tokenizer, max_length=max_length, batch_size=config.batch_size)

    training, held_out = preparation.read_data(run, read)
    tokenized = preparation.cache_messages(run, training, held_out)
    steps_in_a_pass = data.steps_in(training.dataset, config)
    total_steps = preparation.steps_in_all(run, steps_in_a_pass)
    memory_plan.choose_checkpointing(run, replaced, found, training.dataset, max_length)
    with preparation.weights(run, found) as start:
        network = preparation.load(run, start, preparation.highest_id(tokenizer, training, held_out))
        trainer = pipeline.build(
            RatedAnswerTrainer,
            run,
            model=network,
            args=KTOConfig(
                **pipeline.trainer_arguments(run, total_steps),
                beta=config.kto.beta,
                loss_type=config.kto.loss_type,
                desirable_weight=config.kto.desirable_weight,
                undesirable_weight=config.kto.undesirable_weight,
                max_length=max_length,
                disable_dropout=no_dropout,
                precompute_ref_log_probs=reference.is_precomputed(run, steps_in_a_pass),
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

"""Reward models (`reward`): pairs → model with a head of one number → trainer → facts → train → export."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import RewardConfig, RewardTrainer

from app.runs.config import Replacement
from worker.training import data, model, pairs
from worker.training.pairs import Pairs
from worker.training.recipes import common
from worker.training.run import Run
from worker.training.trainer import Faithful


class RewardModelTrainer(Faithful, RewardTrainer):  # type: ignore[misc]
    """A `RewardTrainer` on tokenised pairs."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "accuracy": "preference_accuracy",
        "margin": "reward_margin",
        "mean_reward": "reward_mean",
        "min_reward": "reward_min",
        "max_reward": "reward_max",
    }


def train(run: Run, replaced: list[Replacement]) -> dict[str, Any]:
    """Train one run to its end or to a stop; returns the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop came before there was anything to save.
    """
    found, tokenizer = common.begin(run)
    max_length = common.longest(run, found, tokenizer, replaced)
    no_dropout = common.no_dropout(run, replaced)
    if pairs.converse(run.job["dataset"]["path"]):
        common.chat_template(run, tokenizer)
    config = run.config

    def read(source: dict[str, Any], chosen: list[int] | None, purpose: common.Purpose) -> Pairs:
        return pairs.comparisons(
            source["path"], tokenizer, max_length=max_length, chosen=chosen, purpose=purpose,
            progress=common.tokenizing(run),
        )  # fmt: skip

    training, held_out = common.read_data(run, read)
    total_steps = common.steps_in_all(run, data.steps_in(training.dataset, config))
    with common.weights(run, found) as start:
        network = common.load(run, start, common.highest_id(tokenizer, training, held_out), "reward")
        trainer = common.build(
            RewardModelTrainer,
            run,
            model=network,
            args=RewardConfig(
                **common.arguments(run, total_steps),
                max_length=None,  # what is too long has been left out
                disable_dropout=no_dropout,
            ),
            train_dataset=data.first_batch(training.dataset, config)
            if config.overfit_first_batch
            else training.dataset,
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=model.lora_config(config, start.revision, "reward"),
        )
        facts = common.tell(trainer, found, replaced, training, held_out, max_length=max_length)
        common.train(trainer)
        return common.finish(trainer, start, facts)
